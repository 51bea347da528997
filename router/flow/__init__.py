"""The life of a request in the router: queue, placement, replies, moves to other replicas; and cache warm-up.

Pure decisions and state. Imported by `router.replicas`. Imports `router.routing`; must not know HTTP, text or sockets.
"""
