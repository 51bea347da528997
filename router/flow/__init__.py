"""The life of a request in the router: waiting, dispatch, replies, cancellation, continuation; and cache warm-up.

Pure decisions and state. Imported by `replicas`. Imports `routing`; must not know HTTP, text or sockets.
"""
