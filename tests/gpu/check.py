"""The GPU check: ceilings, correctness and speed on one GPU, within 540 s and without network.

    python tests/gpu/check.py [--out FILE] [--stages a,b] [--device cpu --tiny]

Each stage runs in a process of its own with a time bound, so that one that hangs or breaks the device costs only
itself. Figures are kept one by one: a stage that breaks or is out of time keeps those before. `--device cpu --tiny`
runs all the code on toy shapes. Needs the packages in NEEDED, and no package index; what a stage needs beyond that, it
says.
"""

import argparse
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))
from tests.bench.report import versions  # noqa: E402

TOTAL_S = 540
#: In place of all bounds on a CPU, which may have other work.
CPU_TOTAL_S = 3600
#: Of these, for the end of a stage that is out of time, and for writing.
ENDING_S = 15
#: A stage that has less does not start: importing torch takes that long.
LEAST_S = 10
NAMES = ("ceilings", "kernels", "reference", "steps", "decode", "prefill", "mixed", "workload", "replicas", "ranks")
#: Modules without which no stage runs, and the wheels that bring them where a GPU image has only the first four.
NEEDED = {
    "torch": "torch",
    "triton": "triton",
    "transformers": "transformers",
    "numpy": "numpy",
    "msgspec": "msgspec",
    "xxhash": "xxhash",
    "zmq": "pyzmq",
}
PACKAGES = (*NEEDED.values(), "flash-attn", "flash-attn-4", "ray")


def main() -> int:
    """Run the stages; 0 when nothing failed and everything that must hold holds."""
    options = arguments()
    if options.run is not None:
        return run_stage(options)
    if absent := [wheel for module, wheel in NEEDED.items() if find_spec(module) is None]:
        print(f"not installed: {', '.join(absent)}; bring their wheels (pip install --no-index --find-links DIR ...)")
        return 2
    started, total_s = time.monotonic(), TOTAL_S if options.device == "cuda" else CPU_TOTAL_S
    report = {
        "machine": machine(options.device),
        "versions": versions(PACKAGES),
        "command": shlex.join(sys.argv),
        "stages": {},
    }
    for name in options.stages.split(","):
        left = total_s - ENDING_S - (time.monotonic() - started)
        report["stages"][name] = outcome = guarded(name, options, left)
        print_stage(name, outcome)
        if options.out is not None:
            options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    broken = [name for name, outcome in report["stages"].items() if not holds(outcome)]
    print(f"failed: {', '.join(broken)}" if broken else "all stages hold")
    return bool(broken)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check and measure homing on one GPU")
    parser.add_argument("--out", type=Path, help="write the results as JSON, after each stage")
    parser.add_argument("--stages", default=",".join(NAMES))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="toy shapes: tests the check itself")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    return parser.parse_args()


def guarded(name: str, options: argparse.Namespace, left_s: float) -> dict[str, Any]:
    """Run a stage in a child process, at most as long as its bound and the whole check allow."""
    if left_s < LEAST_S:
        return {"error": f"no time left: the stages before took all of {TOTAL_S} s", "seconds": 0.0}
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "homing").symlink_to(ROOT)
        found = Path(folder) / "found.json"
        command = [sys.executable, str(HERE / "check.py"), "--run", name, "--device", options.device]
        command += ["--out", str(found), *(["--tiny"] if options.tiny else [])]
        path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        # Deterministic cuBLAS, which the kernels' tests ask for.
        environment = os.environ | {"PYTHONPATH": path, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        with subprocess.Popen(command, env=environment, start_new_session=True) as child:
            try:
                status = child.wait(min(bound_s(name), left_s) if options.device == "cuda" else left_s)
                problem = {} if status == 0 else {"error": f"ended with {status}"}
            except subprocess.TimeoutExpired:
                end_group(child)
                problem = {"error": f"not done after {time.monotonic() - started:.0f} s"}
            # Written until the end or the time limit; what a stage says of its own failure is better.
            outcome = problem | (json.loads(found.read_text()) if found.exists() else {})
    return outcome | {"seconds": round(time.monotonic() - started, 1)}


def end_group(child: "subprocess.Popen[bytes]") -> None:
    """End a stage and all that it started: what serves gets a moment to take its replicas along."""
    os.killpg(child.pid, signal.SIGINT)
    try:
        child.wait(ENDING_S - 5)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)


def bound_s(name: str) -> int:
    """Seconds that a stage may take; loading a kernel for the first time compiles it."""
    bounds = {"ceilings": 40, "kernels": 110, "reference": 30, "steps": 90, "decode": 110, "prefill": 70}
    return (bounds | {"mixed": 60, "workload": 90}).get(name, 110)


def run_stage(options: argparse.Namespace) -> int:
    """In the child: run one stage and leave its figures, or why there are none, in a file."""
    sys.path.insert(0, str(HERE))
    import torch
    from stages import STAGES, Setup, Skipped

    torch.set_num_threads(1)
    outcome: dict[str, Any] = {"figures": []}

    def write() -> None:
        whole = options.out.with_suffix(".new")  # the stage may be ended while it writes
        whole.write_text(json.dumps(outcome))
        whole.replace(options.out)

    try:
        for figure in STAGES[options.run](Setup(torch.device(options.device), options.tiny)):
            outcome["figures"].append(asdict(figure))
            write()
    except Skipped as reason:
        outcome["skipped"] = str(reason)
    except Exception:
        outcome["error"] = traceback.format_exc()
    write()
    return 0


def holds(outcome: dict[str, Any]) -> bool:
    """Whether a stage ran, and no figure of it that must hold does not."""
    failed = [figure for figure in outcome.get("figures", []) if figure["met"] is False]
    return "error" not in outcome and not failed


def print_stage(name: str, outcome: dict[str, Any]) -> None:
    print(f"## {name} ({outcome['seconds']} s)")
    for figure in outcome.get("figures", []):
        goal = "" if figure["goal"] is None else f"  goal {figure['goal']:g}"
        met = {None: "", True: "  holds", False: "  MISSED"}[figure["met"]]
        print(f"{figure['name']:44} {figure['value']:12.4g} {figure['unit']}{goal}{met}")
    for kind in ("skipped", "error"):
        if kind in outcome:
            print(f"{kind}: {outcome[kind]}")
    sys.stdout.flush()


def machine(device: str) -> str:
    """What it ran on."""
    if device == "cpu":
        return f"{platform.machine()}, {os.cpu_count()} cores, no GPU"
    asked = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"unknown GPU ({error})"


if __name__ == "__main__":
    sys.exit(main())
