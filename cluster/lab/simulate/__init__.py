"""A discrete-event simulation of routing: the production placement and policies over modelled replicas.

Imported only by the command line, benchmarks and tests. Uses virtual time; must not use sockets, Ray or models.
"""
