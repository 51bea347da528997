"""How long the steps of one replica take, with all its ranks. Pure numbers; knows no queues and no caches."""

from dataclasses import dataclass

from ...errors import SettingsError


@dataclass(slots=True, frozen=True)
class MockerModel:
    """The polynomials of Dynamo's mocker: a 70B-class model on a modern GPU node.

    prefill ms = 4.21e-7 n² + 0.01518 n + 16.5; decode ms = max(1, -25.74 a² + 54.01 a + 5.74).
    """

    def prefill_s(self, start: int, end: int) -> float:
        """Seconds for the uncached tokens `start` to `end` of a prompt: the difference of the polynomial at both, so
        that chunks add up to the whole. `start` 0 includes the fixed part."""
        fixed = 0.0 if start else 16.5
        return (4.21e-7 * (end * end - start * start) + 0.01518 * (end - start) + fixed) / 1000

    def decode_step_s(self, active_share: float) -> float:
        """Seconds for one token of every running request, with this share of the KV blocks in use."""
        return max(1.0, -25.74 * active_share * active_share + 54.01 * active_share + 5.74) / 1000


@dataclass(slots=True, frozen=True)
class RateModel:
    """Constant rates, given or measured on a real replica (its load reports carry both)."""

    prefill_tokens_per_s: float
    step_s: float

    def __post_init__(self) -> None:
        for field in ("prefill_tokens_per_s", "step_s"):
            if not getattr(self, field) > 0:
                raise SettingsError(f"{field} must be above 0, not {getattr(self, field)}")

    def prefill_s(self, start: int, end: int) -> float:
        return (end - start) / self.prefill_tokens_per_s

    def decode_step_s(self, active_share: float) -> float:  # noqa: ARG002
        return self.step_s


StepTimes = MockerModel | RateModel
