"""API dialects: each is one module that maps bodies to jobs and results to bodies (see `dialect.py`).

Imported by `http.endpoints`. `http.generation` runs the jobs of all dialects and is independent of them.
"""
