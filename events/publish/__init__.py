"""The publishing side: the event log, what a step changed, and the thread that owns the sockets.

Imported by `replica` (and the simulator). Imports `wire` and `security`.
"""
