"""Who sends a request and what they may use: API keys, rate limits, usage shared between router processes.

Imported by `http` and `metrics`. Must not know routing or HTTP.
"""
