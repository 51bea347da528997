"""The HTTP front end: an HTTP/1.1 server (`protocol`), the API endpoints (`openai`), and what both share.

Imported by `router.server`. Reaches the routing side only through `router.backend`.
"""
