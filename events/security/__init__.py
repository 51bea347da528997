"""CURVE keys and the authenticator that checks them: encryption and mutual authentication of ZeroMQ sockets.

Imported by all code that opens a socket. Must not import anything but `events.config` and `events.errors`.
"""
