"""Linears whose weights stay in 8 bits, as their checkpoint has them: torch's `scaled_mm` multiplies them on CUDA.

Activations are rounded to 8 bits, too: by token, or by token and 128 features where weights have a scale for each block
of 128 by 128. Each shape of weight is tried at load: where the device, its libraries or the shape do not allow such a
product, or it is wrong, the weight is dequantized, and the log says why. Not run on a GPU.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.functional import ScalingType

from ..kernels.base import TorchKernels

log = logging.getLogger(__name__)

DTYPE = torch.float8_e4m3fn
#: Rows and columns of the only blocks that `scaled_mm` multiplies by a scale each.
BLOCK = 128
#: Rows of the products that are tried: of decodes, and of a prompt.
TRIED_ROWS = (1, 3, 40)
#: Most of a product's norm that rounding its activations to 8 bits may change; it is about 0.026 for normal numbers.
MOST_ERROR = 0.06

#: `torch.nn.functional.scaled_mm`.
ScaledProduct = Callable[..., torch.Tensor]


@dataclass(slots=True, frozen=True)
class ScaledWeight:
    """A weight in 8 bits, or a rank's part of it, and the factors of its numbers."""

    numbers: torch.Tensor  #: [outputs, inputs] E4M3
    scales: torch.Tensor  #: float32 [outputs, 1], or of each block [ceil(outputs / BLOCK), ceil(inputs / BLOCK)]

    @property
    def by_row(self) -> bool:
        return len(self.scales) == len(self.numbers)

    def exact(self) -> torch.Tensor:
        """The weight in float32."""
        if self.by_row:
            return self.numbers.float() * self.scales
        rows, columns = (torch.arange(size, device=self.scales.device) // BLOCK for size in self.numbers.shape)
        return self.numbers.float() * self.scales[rows][:, columns]


def joined(parts: Sequence[ScaledWeight | str | None]) -> ScaledWeight | str:
    """Weights of the same inputs as one, or why they cannot be: a text stands for one that must be dequantized."""
    weights = [each for each in parts if isinstance(each, ScaledWeight)]
    if len(weights) < len(parts):
        return next(
            (each for each in parts if isinstance(each, str)), "only some of linears that are joined have scales"
        )
    if len({each.by_row for each in weights}) > 1:
        return "linears that are joined have scales of rows and of blocks"
    if not weights[0].by_row and any(len(each.numbers) % BLOCK for each in weights[:-1]):
        return f"linears that are joined end within blocks of {BLOCK} rows"
    return ScaledWeight(torch.cat([each.numbers for each in weights]), torch.cat([each.scales for each in weights]))


class ScaledLinear:
    """y = x W^T + b."""

    __slots__ = ("_bias", "_features", "_kernels", "_numbers", "_product", "_recipes", "_scales", "out_features")

    def __init__(
        self, weight: ScaledWeight, bias: torch.Tensor | None, kernels: TorchKernels, product: ScaledProduct
    ) -> None:
        self.out_features, inputs = weight.numbers.shape
        self._bias, self._kernels, self._product = bias, kernels, product
        self._numbers = weight.numbers.t()
        if weight.by_row:
            self._features, self._recipes = inputs, (ScalingType.RowWise, ScalingType.RowWise)
            self._scales = weight.scales.t()
        else:
            self._features, self._recipes = BLOCK, (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128)
            self._scales = F.pad(weight.scales, (0, -weight.scales.shape[1] % 4)).t()  # columns start at 16 bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rounded, scales = self._kernels.round_rows(x, self._features)
        of_x, of_weight = self._recipes
        y = self._product(rounded, self._numbers, scales, of_x, self._scales, of_weight, output_dtype=x.dtype)[: len(x)]
        return y if self._bias is None else y + self._bias


class ScaledLinears:
    """Makes the linears of one model; tries each shape of weight once."""

    def __init__(self, kernels: TorchKernels, dtype: torch.dtype, product: ScaledProduct) -> None:
        self._kernels, self._dtype, self._product = kernels, dtype, product
        self._tried: dict[tuple[int, int, bool], str | None] = {}
        self._refused: set[str] = set()

    def linear(self, parts: Sequence[ScaledWeight | str | None], bias: torch.Tensor | None) -> ScaledLinear | None:
        """The linear of joined weights; None: they are dequantized, or the checkpoint has all in another type."""
        if not any(parts):
            return None
        weight = joined(parts)
        if isinstance(weight, str):
            self.refuse(weight)
            return None
        made = ScaledLinear(weight, bias, self._kernels, self._product)
        outputs, inputs = weight.numbers.shape
        key = (outputs, inputs, weight.by_row)
        if key not in self._tried:
            plain = made if bias is None else ScaledLinear(weight, None, self._kernels, self._product)
            self._tried[key] = _problem(plain, weight, self._dtype)
        problem = self._tried[key]
        if problem is None:
            return made
        self.refuse(f"{problem} ({outputs} x {inputs}, scales by {'row' if weight.by_row else 'block'})")
        return None

    def refuse(self, reason: str) -> None:
        """Log why a weight is dequantized, once."""
        if reason not in self._refused:
            self._refused.add(reason)
            log.warning("fp8_product_unusable reason=%r", f"{reason}: dequantized")


def _problem(linear: ScaledLinear, weight: ScaledWeight, dtype: torch.dtype) -> str | None:
    """Why the products of a weight cannot be used, or None."""
    generator, exact = torch.Generator().manual_seed(0), weight.exact()
    for rows in TRIED_ROWS:
        x = torch.randn(rows, exact.shape[1], generator=generator).to(exact.device, dtype)
        wanted = F.linear(x.float(), exact)
        try:
            error = float((linear(x).float() - wanted).norm() / wanted.norm())
        except (RuntimeError, ValueError, NotImplementedError) as failure:
            return f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}"
        if not error < MOST_ERROR:
            return f"results differ from the exact ones by {error:.1%}"
    return None
