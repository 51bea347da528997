"""Block hashes, block pool and prefix cache.

Imported by `replica`, `router` and `cluster`. Must not import other packages of homing, torch, zmq or Ray, so that the
router can share the hashing.
"""
