"""Ray: placement, start, healing, scaling; the settings and the command line.

The only top-level package that imports Ray. Nothing imports it.
"""
