"""The HTTP front end: a server of our own (`protocol`) and the endpoints behind it (`openai`).

Talks to the routing side only through `router.backend`.
"""
