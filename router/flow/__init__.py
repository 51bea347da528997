"""The life of a request in the router: queueing, placement, replies, moves between replicas; and cache warm-up.

Pure decisions and state. Imported by `router.replicas` and the simulator. Imports `router.routing`; must not import
HTTP, text or sockets.
"""
