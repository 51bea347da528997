"""Offline tools: `homing simulate`, `homing analyze` and their plots.

Imported only by the command line, when such a command runs. May import the packages that it models; serving code must
not import it.
"""
