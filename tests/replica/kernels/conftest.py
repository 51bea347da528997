"""Without a GPU, kernels run in Triton's interpreter. Fresh tensors hold NaN, so that unwritten outputs are noticed.

Triton reads the variable when a kernel's module is imported, so it is set before any test imports one.
"""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch

if find_spec("triton") is None:
    collect_ignore_glob = ["triton/*"]
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def round_to_8_bits_as_gpus_do() -> None:
    """Triton's interpreter (3.7.1) halves numbers whose mantissa is rounded up to the next power of two."""
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def converted(x: Any, of: Any, to: Any, rounding: Any) -> Any:
        if (of.name, to.name) != ("fp32", "fp8e4nv"):
            return convert(x, of, to, rounding)
        return torch.from_numpy(x.copy()).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    interpreter._convert_float = converted


if find_spec("triton") is not None:
    round_to_8_bits_as_gpus_do()


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """Fill every torch.empty with NaN, or with the greatest value of an integer dtype."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
