"""Tensor parallelism: the ranks of one replica, and the channel on which rank 0 broadcasts each step.

Imported by `server`, `execute` and `cluster`. Must not depend on routers.
"""
