"""Paged attention on top of `kernels`: the pool, a step and its attention (`paged`, `flash`), the backend (`choice`).

Imported by `execute`. Imports `kernels` and `models.base`; must not depend on requests, scheduling or sockets.
"""
