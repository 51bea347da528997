"""A discrete-event simulation of routing: the production placement and policies over modelled replicas.

Uses virtual time, no sockets and no tokens. Only `homing simulate` (command.py), benchmarks and tests import it.
"""
