"""The OpenAI-compatible endpoints: request and response types, validation, streaming.

Imports `protocol`, `text` and `tenants`; reaches replicas only through `router.backend`.
"""
