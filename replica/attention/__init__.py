"""Paged attention over `kernels`: the data of a step (`base`), its attention (`paged`, `flash`), the backend (`choice`).

Imported by `execute`. Imports `kernels` and `models.base`; must not know requests, scheduling or sockets.
"""
