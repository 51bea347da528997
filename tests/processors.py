"""Run what depends on the processor's instructions once per kind of processor: `make test-processors`.

Torch, oneDNN and numba are limited to what each kind offers. Kinds that this machine lacks are named and skipped.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import llvmlite.binding as llvm

#: Tests whose verdicts could depend on the order of sums, on rounding, or on the kernels that a processor gets.
DEPENDENT = (
    *(f"tests/replica/{room}" for room in ("attention", "execute", "kernels", "load", "models", "parallel")),
    *(f"tests/replica/engine/test_{part}.py" for part in ("embeddings", "overlapped", "sampler")),
    "tests/demo_model",
)
_AVX512 = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of processor, and the settings that limit torch, oneDNN and numba to it."""

    name: str
    adds: tuple[str, ...]  #: LLVM's names of the instructions that it has beyond the kind before it
    torch: str  #: ATEN_CPU_CAPABILITY
    onednn: str  #: ONEDNN_MAX_CPU_ISA
    llvm: str  #: NUMBA_CPU_NAME


#: Each kind has the instructions of those before it.
KINDS = (
    Kind("SSE4.2", ("sse4.2",), "default", "SSE41", "nehalem"),
    Kind("AVX2", ("avx", "avx2", "fma", "f16c"), "avx2", "AVX2", "haswell"),
    Kind("AVX-512 without bfloat16", _AVX512, "avx512", "AVX512_CORE", "skylake-avx512"),
    Kind("AVX512_BF16", ("avx512bf16",), "avx512", "AVX512_CORE_BF16", "cooperlake"),
    Kind("AMX", ("amx-tile", "amx-bf16", "amx-int8"), "avx512", "AVX512_CORE_AMX", "sapphirerapids"),
)
#: Prefixes of the instructions that come with AVX and AMX; LLVM has dozens of them.
_VECTORS = ("avx", "amx", "fma", "f16c", "vaes", "vpclmul", "xop", "gfni")


def lacking(kind: Kind, host: Mapping[str, bool]) -> list[str]:
    """The instructions of this kind that the host does not have."""
    needed = [name for each in KINDS[: KINDS.index(kind) + 1] for name in each.adds]
    return [name for name in needed if not host.get(name)]


def environment(kind: Kind, host: Mapping[str, bool]) -> dict[str, str]:
    """The variables that limit a process to this kind. numba gets every vector instruction by name, on or off."""
    allowed = {name for each in KINDS[: KINDS.index(kind) + 1] for name in each.adds}
    on = {name: has and (name in allowed or not name.startswith(_VECTORS)) for name, has in host.items()}
    return {
        "ATEN_CPU_CAPABILITY": kind.torch,
        "ONEDNN_MAX_CPU_ISA": kind.onednn,
        "NUMBA_CPU_NAME": kind.llvm,
        "NUMBA_CPU_FEATURES": ",".join(f"{'+' if has else '-'}{name}" for name, has in sorted(on.items())),
    }


def main(arguments: list[str]) -> int:
    host = dict(llvm.get_host_cpu_features())
    failed, skipped = [], []
    for kind in KINDS:
        if missing := lacking(kind, host):
            skipped.append(f"{kind.name} (no {', '.join(missing)})")
            continue
        print(f"== {kind.name} ==", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not gpu and not slow and not cluster"]
        command += ["--hypothesis-profile=fast", "--numprocesses=2", "--dist=loadfile", *(arguments or DEPENDENT)]
        if subprocess.run(command, env={**os.environ, **environment(kind, host)}, check=False).returncode:
            failed.append(kind.name)
    print(f"skipped, as this machine lacks them: {'; '.join(skipped) or 'none'}")
    print(f"failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
