"""What a log of requests says about caching: how much could be shared, and how large a cache would share it.

Pure arithmetic over block names. Knows no text, no files, no models and no clock; `cluster/analyze` feeds it.
"""

from .log_analysis import BreakRow, LogAnalysis, LoggedPrompt, LogReport, ReplicaRow, WindowRow
from .prefix_names import PrefixNames
from .replica_spread import Affine, ReplicaCaches, RoundRobin
from .reuse_stack import HitCurve, ReuseStack

__all__ = [
    "Affine",
    "BreakRow",
    "HitCurve",
    "LogAnalysis",
    "LogReport",
    "LoggedPrompt",
    "PrefixNames",
    "ReplicaCaches",
    "ReplicaRow",
    "ReuseStack",
    "RoundRobin",
    "WindowRow",
]
