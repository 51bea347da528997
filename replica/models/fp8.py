"""Linears that keep their checkpoint's FP8 weights, multiplied on CUDA by torch's `scaled_mm`.

Activations are rounded to FP8 as well, with one scale per token, or per token and 128 features if the weight has one
scale per 128 by 128 block. Each weight shape is tried at load. If the device, its libraries or the shape do not support
the product, or its result is wrong, the weight is dequantized and the reason is logged. Not run on a GPU.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.functional import ScalingType

from ..kernels.base import ROUNDED_ROWS, TorchKernels
from ..load.quantized import BLOCK
from .spec import FP8

log = logging.getLogger(__name__)

FP8_DTYPE: torch.dtype = getattr(torch, FP8)
#: Row counts to try: those of decodes, and of a prompt.
TRIED_ROWS = (1, 3, 40)
#: Largest accepted error of a product, relative to its norm. Rounding normally distributed activations to FP8 gives
#: about 0.026.
MAX_ERROR = 0.06

#: `torch.nn.functional.scaled_mm`.
ScaledProduct = Callable[..., torch.Tensor]


@dataclass(slots=True, frozen=True)
class ScaledWeight:
    """An FP8 weight, or a rank's part of it, and its scales."""

    numbers: torch.Tensor  #: [outputs, inputs] E4M3
    scales: torch.Tensor  #: float32 [outputs, 1], or per block [ceil(outputs / BLOCK), ceil(inputs / BLOCK)]

    @property
    def by_row(self) -> bool:
        return len(self.scales) == len(self.numbers)

    def exact(self) -> torch.Tensor:
        """The dequantized weight in float32."""
        if self.by_row:
            return self.numbers.float() * self.scales
        rows, columns = (torch.arange(size, device=self.scales.device) // BLOCK for size in self.numbers.shape)
        return self.numbers.float() * self.scales[rows][:, columns]


def joined(parts: Sequence[ScaledWeight | str | None]) -> ScaledWeight | str:
    """Weights with the same inputs fused into one, or the reason why not. A str part must itself be dequantized."""
    weights = [each for each in parts if isinstance(each, ScaledWeight)]
    if len(weights) < len(parts):
        return next((each for each in parts if isinstance(each, str)), "only some of the fused linears have scales")
    if len({each.by_row for each in weights}) > 1:
        return "the fused linears mix scales of rows and of blocks"
    if not weights[0].by_row and any(len(each.numbers) % BLOCK for each in weights[:-1]):
        return f"the fused linears end within blocks of {BLOCK} rows"
    return ScaledWeight(torch.cat([each.numbers for each in weights]), torch.cat([each.scales for each in weights]))


class ScaledLinear:
    """y = x W^T + b, with x rounded to FP8."""

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
            self._scales = F.pad(weight.scales, (0, -weight.scales.shape[1] % ROUNDED_ROWS)).t()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rounded, scales = self._kernels.round_rows(x, self._features)
        of_x, of_weight = self._recipes
        y = self._product(rounded, self._numbers, scales, of_x, self._scales, of_weight, output_dtype=x.dtype)[: len(x)]
        return y if self._bias is None else y + self._bias


class ScaledLinears:
    """Makes the FP8 linears of one model; tries each weight shape once."""

    def __init__(self, kernels: TorchKernels, dtype: torch.dtype, product: ScaledProduct) -> None:
        self._kernels, self._dtype, self._product = kernels, dtype, product
        self._tried: dict[tuple[int, int, bool], str | None] = {}
        self._refused: set[str] = set()

    def linear(self, parts: Sequence[ScaledWeight | str | None], bias: torch.Tensor | None) -> ScaledLinear | None:
        """The linear of the fused weights; None: they must be dequantized, or none of them is quantized."""
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
        """Log once why weights are dequantized."""
        if reason not in self._refused:
            self._refused.add(reason)
            log.warning("fp8_product_unusable reason=%r", f"{reason}: dequantized")


def _problem(linear: ScaledLinear, weight: ScaledWeight, dtype: torch.dtype) -> str | None:
    """The reason why a linear's products cannot be used, or None."""
    generator, exact = torch.Generator().manual_seed(0), weight.exact()
    for rows in TRIED_ROWS:
        x = torch.randn(rows, exact.shape[1], generator=generator).to(exact.device, dtype)
        wanted = F.linear(x.float(), exact)
        try:
            error = float((linear(x).float() - wanted).norm() / wanted.norm())
        except (RuntimeError, ValueError, NotImplementedError) as failure:
            return f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}"
        if not error < MAX_ERROR:
            return f"results differ from the exact ones by {error:.1%}"
    return None
