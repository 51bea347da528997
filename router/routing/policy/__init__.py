"""Routing policies: one file each, behind the `Policy` base class.

A policy is a module here (or in `peers/`) that names its classes in `POLICIES`; `registry.py` finds it. Imported by
`routing.placement`, the settings and the simulator. A policy may use `routing.prefix_index`, `routing.reservations` and
`routing.replica_load`, but must not import `flow`, `replicas`, `http`, sockets or clocks: time and randomness come in.
"""
