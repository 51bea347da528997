"""Block hashes, block pool and prefix cache. Imports no torch, zmq or ray, so that the router can share the hashing."""
