"""A library with a bug in any part of its job is refused, and a right one is not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from homing.replica.attention.flash import Flash4Attention
from homing.replica.attention.paged import KvPool
from homing.replica.attention.trial import trial_problem
from homing.replica.kernels.base import TorchKernels
from homing.replica.models.base import AttentionRule
from homing.replica.models.spec import KvShape, ModelSpec

from .test_flash import cute_varlen

HEADS = 4
RULES = {
    "plain": AttentionRule(0.3),
    "window": AttentionRule(0.3, window=4096),
    "softcap": AttentionRule(0.3, softcap=2.0),
    "sinks": AttentionRule(0.3, sinks=torch.linspace(-1, 2, HEADS)),
}


def tried(call: Callable[..., Any], *rules: str, size: int = 16) -> str | None:
    spec = ModelSpec((KvShape(2, 16, 16),) * len(rules), 10, 64, (), "float32", 4)
    pool = KvPool(spec, 2, size, torch.float32, torch.device("cpu"))
    return trial_problem(
        lambda tried: Flash4Attention(tried, TorchKernels(), call, splits=True),
        pool,
        [RULES[each] for each in rules],
        4,
    )


def broken(**changes: Callable[[Any], Any]) -> Callable[..., Any]:
    """The stand-in of flash-attn-4 with some arguments changed on their way."""

    def call(q, k, v, **arguments):
        changed = {name: change(arguments[name]) for name, change in changes.items()}
        return cute_varlen(q, k, v, **arguments | changed, splits=True)

    return call


def in_order(tables: torch.Tensor) -> torch.Tensor:
    """Pages as if each row's followed its first one."""
    return tables[:, :1] + torch.arange(tables.shape[1], dtype=torch.int32)


@pytest.mark.parametrize("size", [1, 2, 16, 256])
def test_a_right_library_passes_with_every_rule(size):
    """All layers of a model are tried, in pages of any size."""
    assert tried(broken(), *RULES, size=size) is None


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (broken(page_table=in_order), "plain"),
        (broken(page_table=lambda tables: tables[:, :1].expand_as(tables)), "plain"),
        (broken(page_table=lambda tables: tables[:1].expand_as(tables)), "plain"),
        (broken(seqused_k=lambda lengths: (lengths - 1).clamp(min=1)), "plain"),
        (broken(window_size=lambda _: (None, None)), "window"),
        (broken(window_size=lambda size: size if size[0] is None else (size[0] + 1, 0)), "window"),
        (broken(softcap=lambda _: 0.0), "softcap"),
        (broken(learnable_sink=lambda _: None), "sinks"),
        (broken(learnable_sink=lambda sinks: None if sinks is None else sinks.flip(0)), "sinks"),
    ],
    ids=[
        "pages in order",
        "first page only",
        "first row only",
        "last key",
        "no window",
        "wide window",
        "no softcap",
        "no sinks",
        "swapped sinks",
    ],
)
def test_a_library_that_is_wrong_anywhere_is_refused(call, rule):
    """A wrong answer from token 17 on would be served without a word: the trial used to see one page and no rule."""
    problem = tried(call, "plain", rule)

    assert problem is not None
    if rule != "plain":
        assert tried(call, "plain") is None
