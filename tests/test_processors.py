"""Which kinds of processors `make test-processors` tries here, and what it limits them to."""

from pathlib import Path

import pytest

from homing.replica.kernels.cpu.runtime.processor import limited

from .processors import DEPENDENT, KINDS, environment, lacking

SSE, AVX2, AVX512, BF16, AMX = KINDS
#: LLVM's names on a processor with AVX-512 and bfloat16, and some that no kind names.
COOPERLAKE = {name: True for kind in KINDS[:-1] for name in kind.adds} | {"aes": True, "avx512vnni": True}
COOPERLAKE |= dict.fromkeys(AMX.adds, False)


def test_kinds_that_the_machine_lacks_are_skipped_by_name() -> None:
    """A run on an old machine must not look like a run on all."""
    assert [lacking(kind, COOPERLAKE) for kind in KINDS] == [[], [], [], [], list(AMX.adds)]
    assert lacking(AVX512, {"sse4.2": True, "avx": True, "avx2": True, "fma": True, "f16c": True}) == list(AVX512.adds)


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_numba_gets_no_instruction_beyond_the_kind(kind) -> None:
    """Each one is switched off by name, as LLVM's processor names imply others."""
    named = environment(kind, COOPERLAKE)["NUMBA_CPU_FEATURES"].split(",")

    allowed = {name for each in KINDS[: KINDS.index(kind) + 1] for name in each.adds}
    assert {each[1:] for each in named if each[0] == "+"} == {*allowed, "aes"}
    assert {each[1:] for each in named} == set(COOPERLAKE)


def test_our_kernels_follow_the_limit_of_numba() -> None:
    """They choose bfloat16 products by the processor, but numba compiles for what it is limited to."""
    assert limited(COOPERLAKE, None)["avx512bf16"]
    assert limited(COOPERLAKE, environment(BF16, COOPERLAKE)["NUMBA_CPU_FEATURES"])["avx512bf16"]
    assert not limited(COOPERLAKE, environment(AVX512, COOPERLAKE)["NUMBA_CPU_FEATURES"])["avx512bf16"]


def test_the_folders_that_depend_on_the_processor_exist() -> None:
    """A moved folder would be left out in silence."""
    root = Path(__file__).resolve().parents[1]
    assert [each for each in DEPENDENT if not (root / each).exists()] == []
