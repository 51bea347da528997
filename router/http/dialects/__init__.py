"""API dialects: each is one module that maps bodies to jobs and results to bodies (see `dialect.py`).

Imported by `http.endpoints` and `cluster.lab.analyze`. Must not import routing or replicas. `http.generation` runs the
jobs of all dialects and is independent of them.
"""
