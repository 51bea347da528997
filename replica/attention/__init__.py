"""Paged attention over `kernels`: a step and its attention (`paged`, `flash`), the backend (`choice`).

Imported by `execute`. Imports `kernels` and `models.base`; must not know requests, scheduling or sockets.
"""
