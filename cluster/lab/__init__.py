"""Offline tools: `homing simulate`, `homing analyze` and their plots.

Imports the rooms it models. No serving code may import it.
"""
