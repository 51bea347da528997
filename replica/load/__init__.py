"""Preparation before serving: sizes memory, measures speed, chooses threads, rejects models and settings.

Imported by `server`, `execute`, `parallel`, `models` and `cluster`. Must not import the server.
"""
