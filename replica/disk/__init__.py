"""The disk tier: KV blocks in one file per rank that survives a restart.

Knows blocks as bytes under a hash: no torch, no engine, no sockets. Must not be imported by the router.
"""
