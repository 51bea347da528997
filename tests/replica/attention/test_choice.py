"""Choosing a backend is pure: every device, dtype and set of packages gives a known result, with all reasons."""

from functools import partial

import msgspec
import pytest
import torch

from homing.replica.attention.choice import Facts, choose, choose_attention, fp8_kv_problem, problems
from homing.replica.attention.flash import Flash4Attention
from homing.replica.attention.paged import KvPool, PagedAttention
from homing.replica.errors import StartupError
from homing.replica.models.base import AttentionRule
from homing.replica.models.spec import KvShape, ModelSpec

from .test_flash import cute_varlen

PLAIN = [AttentionRule(0.3)]

EVERYTHING = frozenset(("triton", "flash_attn", "flash_attn_3", "flash_attn_4"))
OLDER = EVERYTHING - {"flash_attn_4"}


def facts(**changes) -> Facts:
    hopper = Facts("cuda", (9, 0), "bfloat16", (128,), EVERYTHING, None)
    return Facts(**{field: changes.get(field, getattr(hopper, field)) for field in Facts.__slots__})


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "flash4"),
        ({"capability": (10, 0)}, "flash4"),
        ({"capability": (10, 0), "head_dims": (192,)}, "flash2"),
        ({"installed": OLDER}, "flash3"),
        ({"installed": frozenset(("flash_attn_4",))}, "reference"),
        ({"capability": (8, 0)}, "flash2"),
        ({"capability": (12, 0)}, "flash2"),
        ({"installed": frozenset(("triton", "flash_attn"))}, "flash2"),
        ({"installed": frozenset(("triton",))}, "triton"),
        ({"dtype": "float32"}, "triton"),
        ({"dtype": "float8_e4m3fn"}, "triton"),
        ({"head_dims": (576,)}, "triton"),
        ({"head_dims": (100,)}, "triton"),
        ({"installed": frozenset(("flash_attn",))}, "reference"),
        ({"capability": (7, 0)}, "reference"),
        ({"device": "cpu", "capability": (0, 0)}, "cpu-compiled"),
        ({"device": "cpu", "capability": (0, 0), "compiled_problem": "dtype float16"}, "cpu-scratch"),
        ({"device": "cpu", "capability": (0, 0), "compiled_problem": "no numba"}, "cpu-scratch"),
        ({"device": "mps", "capability": (0, 0)}, "reference"),
    ],
)
def test_best_usable_backend_is_chosen(changes, name):
    """The choice must not fail in the first step."""
    chosen, refused = choose(facts(**changes))

    assert chosen == name
    assert all(refused.values())


def test_all_reasons_are_given_at_once():
    """An operator who fixes one problem must not find the next one only at the next start."""
    found = problems("flash2", facts(capability=(7, 0), dtype="float32", head_dims=(300,), installed=frozenset()))

    assert [
        word for word in ("triton", "7.0", "flash_attn", "float32", "300") if any(word in why for why in found)
    ] == [
        "triton",
        "7.0",
        "flash_attn",
        "float32",
        "300",
    ]


def pool(dtype: str = "float32") -> KvPool:
    spec = ModelSpec((KvShape(2, 8, 8),), 10, 64, (), dtype, 4)
    return KvPool(spec, 2, 4, getattr(torch, dtype), torch.device("cpu"))


@pytest.mark.parametrize(
    ("wanted", "dtype", "chosen"),
    [
        ("auto", "float32", "cpu-compiled"),
        ("auto", "bfloat16", "cpu-compiled"),
        ("auto", "float16", "cpu-scratch"),
        ("cpu-scratch", "float32", "cpu-scratch"),
        ("reference", "float32", "reference"),
    ],
)
def test_cpu_gets_its_best_backend_or_the_named_one(wanted, dtype, chosen, caplog):
    """`auto` never takes a slower backend than necessary, and the log names its choice."""
    caplog.set_level("INFO", logger="homing")  # other tests may have raised the level

    attention = choose_attention(pool(dtype), torch.device("cpu"), wanted, rules=PLAIN)

    assert isinstance(attention, PagedAttention)
    assert f"attention_chosen backend={chosen} " in caplog.text


def missing(*_):
    raise ImportError("undefined symbol: _ZN3c10")


def flash4_with(call):
    return lambda pool, kernels, _: Flash4Attention(pool, kernels, call, splits=True)


def refusing(*_, **__):
    raise AssertionError("SplitKV not supported on SM 9.0")


@pytest.mark.parametrize(
    ("library", "reason"),
    [
        (missing, "cannot be loaded: ImportError: undefined symbol: _ZN3c10"),
        (flash4_with(refusing), "AssertionError: SplitKV not supported on SM 9.0"),
        (flash4_with(lambda q, *_, **__: q), "its results differ from the exact ones by"),
        (
            flash4_with(lambda q, *_, **__: torch.full_like(q, torch.nan)),
            "its results differ from the exact ones by nan",
        ),
    ],
)
def test_a_library_that_fails_its_trial_is_not_used(library, reason, caplog):
    """Its kernels are compiled at first use, by a beta, on a device that nobody has tried."""
    caplog.set_level("INFO", logger="homing")
    filled = pool("bfloat16")
    libraries = {"cpu-compiled": library}

    attention = choose_attention(filled, torch.device("cpu"), rules=PLAIN, query_heads=4, libraries=libraries)

    assert type(attention) is PagedAttention
    assert f"attention_unusable backend=cpu-compiled reasons='{reason}" in caplog.text
    assert "attention_chosen backend=cpu-scratch " in caplog.text
    with pytest.raises(StartupError, match=f"attention_backend: cpu-compiled cannot be used: {reason}.*; use auto"):
        choose_attention(filled, torch.device("cpu"), "cpu-compiled", rules=PLAIN, libraries=libraries)


@pytest.mark.parametrize("query_heads", [0, 4])
def test_a_library_that_passes_its_trial_is_used_and_the_pool_stays_empty(query_heads):
    """Leftovers of the trial would be NaN to whoever trusts that a new pool is zero."""
    filled = pool("bfloat16")
    libraries = {"cpu-compiled": flash4_with(partial(cute_varlen, splits=True))}

    chosen = choose_attention(filled, torch.device("cpu"), rules=PLAIN, query_heads=query_heads, libraries=libraries)

    assert type(chosen) is Flash4Attention
    assert not any(bool(each.any()) for each in (*filled.keys, *filled.values))


def test_named_backend_that_cannot_work_is_refused_with_the_reasons():
    """A silent fallback would serve at a fraction of the requested speed."""
    with pytest.raises(StartupError, match=r"attention_backend: flash3 .*works on cuda, not on cpu"):
        choose_attention(pool(), torch.device("cpu"), "flash3", rules=PLAIN)


def test_every_name_is_a_value_of_the_setting():
    """The setting's type repeats the names because settings must not import attention."""
    from homing.replica.attention.choice import NAMES
    from homing.replica.config import ReplicaSettings

    for name in ("auto", *NAMES):
        assert msgspec.convert({"attention_backend": name}, ReplicaSettings).attention_backend == name


@pytest.mark.parametrize(
    ("capability", "dtype", "said"),
    [
        (None, "float32", None),
        ((8, 9), "bfloat16", None),
        ((9, 0), "float16", None),
        ((8, 6), "bfloat16", "needs compute capability 8.9, this device has 8.6"),
        ((9, 0), "float32", "dtype float32 is not one of bfloat16, float16"),
    ],
)
def test_kv_in_8_bits_is_refused_where_no_kernel_reads_it(capability, dtype, said):
    """Triton has no 8-bit floats for older GPUs, and its float32 tiles are for float32 keys."""
    found = fp8_kv_problem(capability, dtype)

    assert said in found if said else found is None
