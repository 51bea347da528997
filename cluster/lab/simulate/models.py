"""How long a replica takes: to compute prompt tokens, and for one decode step. Pure numbers, no state.

A model describes one replica with its whole gang of ranks. It knows nothing of queues or caches (replica.py).
"""

from dataclasses import dataclass
from typing import Protocol

from .errors import SimulationError


class ReplicaModel(Protocol):
    """Durations of one replica's work."""

    @property
    def name(self) -> str:
        """For reports."""

    def prefill_s(self, start: int, end: int) -> float:
        """Seconds for a prompt's uncached tokens from the `start`-th to the `end`-th; `start` 0 has the fixed part."""

    def decode_step_s(self, active_share: float) -> float:
        """Seconds for one token of every running request, with this share of the KV blocks in use."""


@dataclass(slots=True, frozen=True)
class MockerModel:
    """The polynomials of Dynamo's mocker: a 70B-class model on a modern GPU node.

    prefill ms = 4.21e-7 n² + 0.01518 n + 16.5; decode ms = max(1, -25.74 a² + 54.01 a + 5.74).
    """

    name: str = "mocker"

    def prefill_s(self, start: int, end: int) -> float:
        """The difference of the polynomial at both ends, so that chunks add up to the whole."""
        fixed = 0.0 if start else 16.5
        return (4.21e-7 * (end * end - start * start) + 0.01518 * (end - start) + fixed) / 1000

    def decode_step_s(self, active_share: float) -> float:
        """Does not depend on the number of requests."""
        return max(1.0, -25.74 * active_share * active_share + 54.01 * active_share + 5.74) / 1000


@dataclass(slots=True, frozen=True)
class RateModel:
    """Constant rates, given or measured on a real replica (its load reports carry both)."""

    prefill_tokens_per_s: float
    step_s: float
    name: str = "rates"

    def __post_init__(self) -> None:
        for field in ("prefill_tokens_per_s", "step_s"):
            if not getattr(self, field) > 0:
                raise SimulationError(f"{field} must be above 0, not {getattr(self, field)}")

    def prefill_s(self, start: int, end: int) -> float:
        """Every token costs the same."""
        return (end - start) / self.prefill_tokens_per_s

    def decode_step_s(self, active_share: float) -> float:  # noqa: ARG002
        """Every step costs the same."""
        return self.step_s
