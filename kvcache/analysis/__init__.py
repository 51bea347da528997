"""What a log of requests says about caching: how much could be shared, and how large a cache would share it.

Pure arithmetic over block names. Knows no text, no files, no models and no clock; `cluster/analyze` feeds it.
"""

from .log import BreakRow, LogAnalysis, LoggedPrompt, LogReport, ReplicaRow, WindowRow
from .names import PrefixNames
from .replicas import Affine, ReplicaCaches, RoundRobin
from .stack import HitCurve, ReuseStack

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
