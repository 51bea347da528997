"""The capabilities of this machine's processor. Knows no torch and no numba, as preflight checks use it."""

import functools

import llvmlite.binding as llvm


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether the processor has AVX-512's instructions for products of bfloat16."""
    return bool(_features().get("avx512bf16"))


@functools.cache
def beats_packed() -> bool:
    """Whether our products of bfloat16 are faster than oneDNN's for any number of rows; else only for one or two.

    Not measured: processors without such instructions, and those with AMX, for which oneDNN has kernels of its own.
    """
    return multiplies_bfloat16() and not _features().get("amx-bf16")


@functools.cache
def _features() -> dict[str, bool]:
    try:
        return dict(llvm.get_host_cpu_features())
    except RuntimeError:  # LLVM cannot tell, on some systems
        return {}
