"""The choice of a backend is pure: for every device, dtype and set of packages it is known, with all reasons."""

import msgspec
import pytest
import torch

from homing.replica.attention.base import KvPool
from homing.replica.attention.choice import Facts, choose, choose_attention, problems
from homing.replica.attention.compiled import CompiledAttention
from homing.replica.attention.cpu import ScratchAttention
from homing.replica.attention.reference import ReferenceAttention
from homing.replica.errors import StartupError
from homing.replica.models.spec import KvShape, ModelSpec

EVERYTHING = frozenset(("triton", "flash_attn", "flash_attn_3"))


def facts(**changes) -> Facts:
    hopper = Facts("cuda", (9, 0), "bfloat16", (128,), 16, EVERYTHING, None)
    return Facts(**{field: changes.get(field, getattr(hopper, field)) for field in Facts.__slots__})


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "flash3"),
        ({"capability": (8, 0)}, "flash2"),
        ({"capability": (12, 0)}, "flash2"),
        ({"installed": frozenset(("triton", "flash_attn"))}, "flash2"),
        ({"installed": frozenset(("triton",))}, "triton"),
        ({"dtype": "float32"}, "triton"),
        ({"head_dims": (576,)}, "triton"),
        ({"head_dims": (100,)}, "triton"),
        ({"installed": frozenset(("flash_attn",))}, "reference"),
        ({"capability": (7, 0)}, "reference"),
        ({"device": "cpu", "capability": (0, 0)}, "cpu-compiled"),
        ({"device": "cpu", "capability": (0, 0), "dtype": "float16"}, "cpu-scratch"),
        ({"device": "cpu", "capability": (0, 0), "compiled_problem": "no numba"}, "cpu-scratch"),
        ({"device": "mps", "capability": (0, 0)}, "reference"),
    ],
)
def test_best_usable_backend_is_chosen(changes, name):
    """Nothing is chosen that would fail in the first step."""
    choice = choose(facts(**changes))

    assert choice.name == name
    assert all(choice.refused.values())


def test_all_reasons_are_given_at_once():
    """An operator who mends one must not find the next at the next start."""
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


def pool() -> KvPool:
    spec = ModelSpec((KvShape(2, 8, 8),), 10, 64, (), "float32", 4)
    return KvPool(spec, 2, 4, torch.float32, torch.device("cpu"))


def test_cpu_gets_its_backend_and_can_have_the_reference():
    """`auto` never takes the slow one where there is a better one; who names it gets it."""
    cpu = torch.device("cpu")

    assert isinstance(choose_attention(pool(), cpu), CompiledAttention)
    assert type(choose_attention(pool(), cpu, "cpu-scratch")) is ScratchAttention
    assert isinstance(choose_attention(pool(), cpu, "reference"), ReferenceAttention)


def test_named_backend_that_cannot_work_is_refused_with_the_reasons():
    """Falling back in silence would serve at a fraction of the speed that was asked for."""
    with pytest.raises(StartupError, match=r"attention_backend: flash3 .*works on cuda, not on cpu"):
        choose_attention(pool(), torch.device("cpu"), "flash3")


def test_every_name_is_a_value_of_the_setting():
    """The setting's type is written out, as a settings struct knows no attention."""
    from homing.replica.attention.choice import NAMES
    from homing.replica.config import ReplicaSettings

    for name in ("auto", *NAMES):
        assert msgspec.convert({"attention_backend": name}, ReplicaSettings).attention_backend == name
