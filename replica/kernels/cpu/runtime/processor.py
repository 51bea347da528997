"""The capabilities of this machine's processor. Needs neither torch nor numba, because preflight checks use it."""

import functools
import os
from collections.abc import Mapping

import llvmlite.binding as llvm


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether the processor has AVX-512's instructions for bfloat16 products."""
    return bool(_features().get("avx512bf16"))


@functools.cache
def has_tiles() -> bool:
    """Whether the processor has matrix registers for bfloat16 (Intel AMX)."""
    return bool(_features().get("amx-bf16"))


@functools.cache
def may_beat_packed() -> bool:
    """Whether our bfloat16 products are expected to be faster than oneDNN's for any number of rows.

    Only an estimate, for checks before a start: `models.layers.few_rows` measures. oneDNN is expected to be faster for
    many rows on processors without such instructions and on those with AMX, for which it has kernels of its own.
    """
    return multiplies_bfloat16() and not has_tiles()


@functools.cache
def _features() -> dict[str, bool]:
    try:
        return limited(dict(llvm.get_host_cpu_features()), os.environ.get("NUMBA_CPU_FEATURES"))
    except RuntimeError:  # on some systems LLVM cannot tell
        return {}


def limited(host: Mapping[str, bool], compiled_for: str | None) -> dict[str, bool]:
    """The host's features without those for which numba does not compile. None: it compiles for all."""
    named = None if compiled_for is None else compiled_for.split(",")
    return {name: has and (named is None or f"+{name}" in named) for name, has in host.items()}
