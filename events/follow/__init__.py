"""The subscribing side: the state machine that follows a publisher, and its sockets.

Imported by `router`, `sdk` and the simulator. Must not depend on `publish` or `sdk`.
"""
