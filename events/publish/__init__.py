"""The publishing side: the event log, the changes of a step, and the thread that owns the sockets.

Imported by `replica` and the simulator. Imports `wire` and `security`; must not import `follow` or `sdk`.
"""
