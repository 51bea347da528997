"""Before serving: reading checkpoints, sizing memory, measuring speed, choosing threads, checking what cannot work.

Imported by `server`, `models` and `cluster`. Must not import the server.
"""
