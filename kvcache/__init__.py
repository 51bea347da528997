"""Block hashes, block pool, prefix cache. Without torch, zmq or ray, so that the router shares the hashing."""
