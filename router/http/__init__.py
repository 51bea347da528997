"""The HTTP front end: an HTTP/1.1 server (`protocol`), `endpoints`, and one module per API dialect (`dialects`).

Imported by `router.server`. Must reach the routing side only through `router.backend`.
"""
