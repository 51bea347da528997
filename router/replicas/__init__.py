"""The replicas a router knows: membership, connections, event feeds, and several versions of a model side by side.

The shell around `flow` and `routing`. Must not import `http` or `text` beyond digests.
"""
