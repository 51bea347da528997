"""The subscribing side: the state machine that follows one publisher, and the sockets around it.

Imported by `router`, `sdk` and the simulator. Must not depend on `publish` or `sdk`.
"""
