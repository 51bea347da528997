"""The replicas that a router knows: membership, connections, event feeds, and several versions of a model side by side.

Connects `flow` and `routing` with sockets and timers. Imported by `router.server`, `cluster.control.assembly` and
`cluster.cli.route`. Must not import `http`, nor `text` beyond digests.
"""
