"""The endpoints. Each API dialect is one module that maps bodies to jobs and results to bodies (see `dialect.py`).

Imported by `http.app`. Imports `protocol`, `text` and `tenants`; reaches replicas only through `router.backend`.
"""
