"""Callers and their limits: API keys, tenants, rate limits, and usage shared between router processes.

Imported by `http` and `metrics`. Must not depend on routing or HTTP.
"""
