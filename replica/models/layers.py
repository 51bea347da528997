"""Linear layers on flat [tokens, features] activations.

On CPUs, `Linear` packs its weight for the fastest product. For bfloat16 that is our compiled kernel where it beats
oneDNN (`processor.beats_packed`); otherwise it is oneDNN (steps 1.5 to 2.5 times as fast as with `F.linear`, measured
on an AMD EPYC core, float32, batch 1 to 8). Where our kernel is faster only for one or two rows, a bfloat16 weight is
packed for both.
"""

import functools
import logging
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812

from ..kernels.choice import compiled_problem

logger = logging.getLogger(__name__)

Product = Callable[[torch.Tensor], torch.Tensor]

#: The most rows with which a product is bound by reading the weight. On one and two cores of an AMD EPYC, oneDNN was
#: about as fast as products in float32 with three rows, and faster with four.
FEW_ROWS = 2
#: The uint8 value that represents an activation of 0.
_ZERO_POINT = 128
#: Lower bound on row maxima, so that rows of zeros have a scale.
TINY = 1e-12


@functools.cache
def _packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs linears of this dtype; logs once why not."""
    problem = packing_problem(dtype)
    if problem:
        logger.warning("linear_packing_unusable dtype=%s reason=%r", dtype, problem)
    return problem is None


def packing_problem(dtype: torch.dtype) -> str | None:
    """The reason why oneDNN's packed linears cannot be used for this dtype, or None.

    They are private torch operators (used by its inductor), so a small product is tried first.
    """
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 32, generator=generator).to(dtype) for rows in (3, 24))
    bias = torch.randn(24, generator=generator).to(dtype)
    try:
        with torch.inference_mode():
            packed = torch.ops.mkldnn._linear_pointwise(x, _pack(weight), bias, "none", [], "")
    except (AttributeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    wanted = F.linear(x, weight, bias)
    close = torch.allclose(packed, wanted, rtol=1e-4 if dtype == torch.float32 else 2e-2, atol=1e-4)
    return None if close else "results differ from torch.nn.functional.linear"


def _pack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    return packed


@functools.cache
def _compiles(dtype: torch.dtype) -> bool:
    """Whether our compiled kernel supports products of this dtype; compiles it if so."""
    if dtype != torch.bfloat16 or compiled_problem() is not None:
        return False
    from ..kernels.cpu.linear.product import compiled  # needs numba
    from ..kernels.cpu.runtime.vectors import dot

    compiled(dot())
    return True


class Linear:
    """y = x W^T + b. On CPUs where oneDNN is faster for many rows, a bfloat16 weight takes twice its bytes."""

    __slots__ = ("_of_few", "_of_many", "out_features")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features = len(weight)
        self._of_few, self._of_many = _products(weight, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return (self._of_few if len(x) <= FEW_ROWS else self._of_many)(x)


def _products(weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[Product, Product]:
    """Two products of a weight: for up to `FEW_ROWS` rows, and for more."""
    if weight.device.type != "cpu":
        return (_plain(weight, bias),) * 2
    if weight.shape[1] % 2 or not _compiles(weight.dtype):
        return (_packed(weight, bias),) * 2
    from ..kernels.cpu.linear.product import pack, product
    from ..kernels.cpu.runtime.processor import beats_packed

    compiled = functools.partial(product, packed=pack(weight, bias))
    return compiled, compiled if beats_packed() else _packed(weight, bias)


class PackedExperts:
    """The weighted sum of down(activation(up(x))) over each token's experts, by compiled kernels (`packs_experts`).

    Weights [experts, outputs, features] of any strides, biases [experts, outputs].
    """

    __slots__ = ("_down", "_up")

    def __init__(
        self,
        up: torch.Tensor,
        down: torch.Tensor,
        up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
    ) -> None:
        from ..kernels.cpu.linear.product import pack

        self._up, self._down = pack(up, up_bias), pack(down, down_bias)

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, activation: Product
    ) -> torch.Tensor:
        from ..kernels.cpu.linear.experts import combine, group, products
        from ..kernels.cpu.pointwise import take

        grouped = group(chosen, len(self._up.weight))
        features = activation(products(take(x, grouped.tokens), self._up, grouped.firsts))
        return combine(products(features, self._down, grouped.firsts), grouped.places, weights)


def packs_experts(up: torch.Tensor, down: torch.Tensor) -> bool:
    """Whether `PackedExperts` supports these weights [experts, outputs, features]."""
    even = not (up.shape[2] % 2 or down.shape[2] % 2)
    return even and up.device.type == "cpu" and up.dtype == down.dtype and _compiles(up.dtype)


def _packed(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    if not _packs(weight.dtype):
        return _plain(weight, bias)
    weight = _pack(weight)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _plain(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    return functools.partial(F.linear, weight=weight, bias=bias)


def int8_problem() -> str | None:
    """The reason why 8-bit linears cannot be used here, or None. They are private torch operators, so one is tried."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 64, generator=generator) for rows in (3, 32))
    try:
        with torch.inference_mode():
            error = Int8Linear(weight)(x) - F.linear(x, weight)
    except (AttributeError, RuntimeError) as failure:
        return f"{type(failure).__name__}: {failure}"
    return None if error.norm() < 0.05 * F.linear(x, weight).norm() else "results differ from the exact ones"


class Int8Linear:
    """y = x W^T + b with x and W in 8 bits: one scale per output for weights, one per token for activations.

    With a scale per token, a result does not depend on the rest of the batch. Measured with 16 rows on an AMD EPYC core
    with avx512_vnni: 1.5 times as fast as packed bfloat16, 3.5 times as float32, with an error of 0.012 of the norm.
    """

    __slots__ = ("_bias", "_packed", "_scales", "_zeros", "out_features")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features = weight.shape[0]
        self._bias = bias
        exact = weight.float()
        self._scales = exact.abs().amax(1).clamp_(min=TINY) / 127
        self._zeros = torch.zeros(len(weight), dtype=torch.int64)
        rounded = (exact / self._scales[:, None]).round_().to(torch.int8)
        self._packed: torch.Tensor = torch.ops.onednn.qlinear_prepack(rounded, None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        exact = x.float()
        scales = exact.abs().amax(-1, keepdim=True).clamp_(min=TINY) / 127
        rounded = (exact / scales).round_().add_(_ZERO_POINT).to(torch.uint8)
        weights = (self._packed, self._scales, self._zeros)
        y: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            rounded, 1.0, _ZERO_POINT, *weights, None, 1.0, 0, torch.float32, "none", [], ""
        )
        y = y.mul_(scales).to(x.dtype)
        return y if self._bias is None else y + self._bias
