"""Who is asking and what they may use: API keys, rate limits, usage shared between router processes.

Imported by `http`. Must not know routing.
"""
