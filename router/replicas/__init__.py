"""A router's replicas: membership, connections, event feeds, and coexisting versions of a model.

Connects `flow` and `routing` with sockets and timers. Imported by `router.server`, `cluster.control.assembly` and
`cluster.cli.route`. Must not import `http`, nor anything of `text` beyond digests.
"""
