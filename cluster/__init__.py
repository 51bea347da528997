"""Runs a cluster on Ray: placement, start, recovery and scaling; also the settings and the command line.

The only top-level package that imports Ray. It may import all others; none of them may import it.
"""
