"""Linear layers on flat [tokens, features] activations.

On CPUs, `Linear` packs its weight for the fastest product. For bfloat16 that is our compiled kernel up to the number
of rows at which oneDNN was measured to be faster on this machine (`few_rows`), and for float32 oneDNN, unless torch's
plain product is faster. A bfloat16 weight that both multiply is packed for both.
"""

import functools
import logging
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812

from ..kernels.choice import compiled_problem

if TYPE_CHECKING:
    from ..kernels.cpu.runtime.measurements import Comparison

logger = logging.getLogger(__name__)

Product = Callable[[torch.Tensor], torch.Tensor]

#: Numbers of rows with which products are compared: bound by reading the weight, by arithmetic, and between.
COMPARED_ROWS = (1, 4, 16, 64)
#: Outputs and features of the weight: 8 MB in bfloat16, more than a core's cache.
COMPARED_WEIGHT = (2048, 2048)
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

    __slots__ = ("_few_rows", "_of_few", "_of_many", "out_features")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features = len(weight)
        self._few_rows, self._of_few, self._of_many = _products(weight, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return (self._of_few if len(x) <= self._few_rows else self._of_many)(x)


def _products(weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[float, Product, Product]:
    """A number of rows, and a weight's product for up to so many rows, and for more."""
    if weight.device.type != "cpu":
        return math.inf, *(_plain(weight, bias),) * 2
    if weight.shape[1] % 2 or not _compiles(weight.dtype):
        return math.inf, *(_packed(weight, bias),) * 2
    few = few_rows()
    compiled = _compiled(weight, bias) if few else _packed(weight, bias)
    return few, compiled, compiled if few == math.inf else _packed(weight, bias)


@functools.cache
def few_rows() -> float:
    """The most rows whose bfloat16 product our compiled kernel computes; oneDNN computes products of more rows."""
    return _most_rows({rows: each.library for rows, each in product_speeds(torch.bfloat16).items()})


def _most_rows(library: Mapping[int, bool]) -> float:
    """From whether the library is to be used with some numbers of rows: the most with which ours is used."""
    ours = [rows for rows, chosen in library.items() if not chosen]
    more = [rows for rows in library if rows > max(ours, default=0)]
    return min(more) // 2 if more else math.inf


@functools.cache
def _plain_is_faster(dtype: torch.dtype) -> bool:
    """Whether torch's plain product is faster than oneDNN's packed one with any number of rows."""
    found = product_speeds(dtype) if dtype == torch.float32 else {}
    return bool(found) and all(each.library for each in found.values())


def product_choice(dtype: torch.dtype) -> str:
    """Which products `Linear` uses for weights of this dtype and why, for people."""
    found = product_speeds(dtype)
    if not found:
        return "oneDNN" if _packs(dtype) else "torch"
    if dtype == torch.bfloat16:
        few, library = few_rows(), "oneDNN"
        chosen = "own kernel" if few == math.inf else f"own kernel up to {few:.0f} rows, oneDNN for more"
    else:
        chosen, library = ("torch", "torch") if _plain_is_faster(dtype) else ("oneDNN", "torch")
    speeds = ", ".join(f"{each.speed:.2f} times with {rows}" for rows, each in found.items())
    return f"{chosen} (speed of {library}: {speeds} rows)"


@functools.cache
def product_speeds(dtype: torch.dtype) -> dict[int, "Comparison"]:
    """How fast the library's product is compared with ours, by number of rows; empty if there is no choice.

    In bfloat16, our compiled kernel is compared with oneDNN; in float32, oneDNN with torch's plain product.
    """
    if compiled_problem(dtype) is not None or not _packs(dtype):
        return {}
    from ..kernels.cpu.runtime.measurements import measurements

    ours, library = (_compiled, _onednn) if _compiles(dtype) else (_onednn, _plain)

    @functools.cache  # not built if all comparisons are known
    def products() -> tuple[Product, Product]:
        weight = torch.ones(COMPARED_WEIGHT, dtype=dtype)
        return ours(weight, None), library(weight, None)

    def compare(rows: int) -> "Comparison":
        x = torch.ones(rows, COMPARED_WEIGHT[1], dtype=dtype)
        return measurements().compare(
            f"product of {rows} rows, {dtype}", lambda: products()[0](x), lambda: products()[1](x)
        )

    with torch.inference_mode():
        return {rows: compare(rows) for rows in COMPARED_ROWS}


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


def _compiled(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    from ..kernels.cpu.linear.product import pack, product

    return functools.partial(product, packed=pack(weight, bias))


def _packed(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    if not _packs(weight.dtype) or _plain_is_faster(weight.dtype):
        return _plain(weight, bias)
    return _onednn(weight, bias)


def _onednn(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
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
