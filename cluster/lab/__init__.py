"""Offline tools: `homing simulate`, `homing analyze` and their plots.

May import the packages that it models. Serving code must not import it.
"""
