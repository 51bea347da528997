"""A discrete-event simulation of routing: the production placement and policies over modelled replicas.

Virtual time, no sockets, no tokens. Imported by `homing simulate` (command.py), benchmarks and tests only.
"""
