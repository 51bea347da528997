"""Chooses a replica for each request: held prefixes, load and prefill cost of every replica, and the policies.

Pure state. Imported by `flow`, `replicas` and the simulator; must not import them, `http`, sockets or clocks.
"""
