"""Kernels run in Triton's interpreter where there is no GPU. Fresh tensors hold NaN, so that what is not written shows.

Triton looks at the variable when a kernel's file is imported, so it is set before any test imports one.
"""

import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

if find_spec("triton") is None:
    collect_ignore_glob = ["triton/*"]
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """Every torch.empty is filled with NaN, integers with their greatest value."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
