"""Routing policies: one file each, behind the `Policy` base class.

A policy module lists its classes in `POLICIES`; `registry.py` finds it. Imported by `routing.placement`, the settings
and the simulator, which adds the policies of other routers. May import `routing.prefix_index`,
`routing.expected_blocks` and `routing.replica_load`, not `flow`, `replicas`, `http`, sockets or clocks: time and
randomness are arguments.
"""
