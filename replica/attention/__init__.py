"""Attention backends behind one protocol (`base`), and the choice between them (`choice`).

Imported by `execute` and `models`. Imports `kernels`; must not know requests, scheduling or sockets.
"""
