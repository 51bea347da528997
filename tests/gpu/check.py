"""Check one GPU: hardware ceilings, correctness and speed, within 540 s and without network.

    python tests/gpu/check.py [--out FILE] [--stages a,b] [--device cpu --tiny]

Each stage runs in its own process with a time limit, so a stage that hangs or breaks the device affects no other stage.
Figures are saved one by one: a stage that fails or runs out of time keeps those it had. `--device cpu --tiny` runs all
the code on toy shapes. Needs the packages in NEEDED and no package index; a stage that needs those in FURTHER reports
what is missing.
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
#: Replaces all time limits on a CPU, which may have other work.
CPU_TOTAL_S = 3600
#: Part of these seconds, reserved for stopping a stage that ran out of time and for writing the report.
ENDING_S = 15
#: A stage with less time left does not start: importing torch alone takes this long.
LEAST_S = 10
NAMES = ("ceilings", "kernels", "reference", "steps", "decode", "prefill", "mixed", "workload", "replicas", "ranks")
#: The stages that measure. If time runs out in them, nothing is known to be wrong.
SPEED = {"ceilings", "decode", "prefill", "mixed", "workload"}
#: Modules that every stage needs, and the wheels that contain them. A GPU image may have only the first four.
NEEDED = {
    "torch": "torch",
    "triton": "triton",
    "transformers": "transformers",
    "numpy": "numpy",
    "msgspec": "msgspec",
    "xxhash": "xxhash",
    "zmq": "pyzmq",
}
_SERVING = {
    "ray": "ray",
    "tokenizers": "tokenizers",
    "safetensors": "safetensors",
    "yaml": "pyyaml",
    "jinja2": "jinja2",
    "httptools": "httptools",
    "uvloop": "uvloop",
    "prometheus_client": "prometheus-client",
    "psutil": "psutil",
    "cyclopts": "cyclopts",
    "rich": "rich",
}
#: What three of the stages need in addition; without it they are skipped.
FURTHER = {
    "kernels": {"pytest": "pytest", "hypothesis": "hypothesis"},
    "replicas": _SERVING,
    "ranks": _SERVING,
}
PACKAGES = (*NEEDED.values(), "flash-attn", "flash-attn-4", "ray")


def main() -> int:
    """Run the stages; 0 if they found nothing wrong. Goals of speed are reported apart and do not change the status."""
    options = arguments()
    if options.run is not None:
        return run_stage(options)
    if absent := missing(NEEDED):
        print(f"not installed: {', '.join(absent)}; install their wheels (pip install --no-index --find-links DIR ...)")
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
        save(report, options.out)
    wrong = [name for name, outcome in report["stages"].items() if not is_correct(name, outcome)]
    slow = [name for name, outcome in report["stages"].items() if not is_fast(name, outcome)]
    report |= {"correct": not wrong, "fast": not slow}
    save(report, options.out)
    print(f"correct: {'yes' if not wrong else 'NO, see ' + ', '.join(wrong)}")
    print(f"fast: {'yes' if not slow else 'goals missed or not measured in ' + ', '.join(slow)}")
    return bool(wrong)


def save(report: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def missing(needed: dict[str, str]) -> list[str]:
    """The wheels of the modules that are not installed."""
    return [wheel for module, wheel in needed.items() if find_spec(module) is None]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check and measure homing on one GPU")
    parser.add_argument("--out", type=Path, help="write the results as JSON, after each stage")
    parser.add_argument("--stages", default=",".join(NAMES))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="toy shapes: tests the check itself")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    return parser.parse_args()


def guarded(name: str, options: argparse.Namespace, left_s: float) -> dict[str, Any]:
    """Run a stage in a child process, limited by its own bound and the time left for the whole check."""
    if left_s < LEAST_S:
        return {"cut": f"no time left: earlier stages took all of {TOTAL_S} s", "seconds": 0.0}
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "homing").symlink_to(ROOT)
        found = Path(folder) / "found.json"
        command = [sys.executable, str(HERE / "check.py"), "--run", name, "--device", options.device]
        command += ["--out", str(found), *(["--tiny"] if options.tiny else [])]
        path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        # Deterministic cuBLAS, which the kernels' tests need.
        environment = os.environ | {"PYTHONPATH": path, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        with subprocess.Popen(command, env=environment, start_new_session=True) as child:
            try:
                status = child.wait(min(bound_s(name), left_s) if options.device == "cuda" else left_s)
                problem = {} if status == 0 else {"error": f"exited with {status}"}
            except subprocess.TimeoutExpired:
                end_group(child)
                problem = {"cut": f"not done after {time.monotonic() - started:.0f} s"}
            # The stage writes figures until the end or the limit; its own account of a failure takes precedence.
            outcome = problem | (json.loads(found.read_text()) if found.exists() else {})
    return outcome | {"seconds": round(time.monotonic() - started, 1)}


def end_group(child: "subprocess.Popen[bytes]") -> None:
    """Stop a stage and all its processes; SIGINT first, so that a server has time to stop its replicas."""
    os.killpg(child.pid, signal.SIGINT)
    try:
        child.wait(ENDING_S - 5)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)


def bound_s(name: str) -> int:
    """Time limit of a stage in seconds; includes compiling kernels when they are first loaded."""
    bounds = {"ceilings": 40, "kernels": 110, "reference": 30, "steps": 90, "decode": 120, "prefill": 60}
    return (bounds | {"mixed": 60, "workload": 110}).get(name, 110)


def run_stage(options: argparse.Namespace) -> int:
    """In the child: run one stage and write its figures, or the reason why there are none, to a file."""
    sys.path.insert(0, str(HERE))
    import torch
    from stages import STAGES, Setup, Skipped

    torch.set_num_threads(1)
    outcome: dict[str, Any] = {"figures": []}

    def write() -> None:
        whole = options.out.with_suffix(".new")  # the stage may be killed while it writes
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


def is_correct(name: str, outcome: dict[str, Any]) -> bool:
    """Whether a stage ran without an error and met its requirements. Without all figures, speed is only unknown."""
    missed = [figure for figure in outcome.get("figures", []) if figure["met"] is False and not figure["speed"]]
    return "error" not in outcome and not missed and ("cut" not in outcome or name in SPEED)


def is_fast(name: str, outcome: dict[str, Any]) -> bool:
    """Whether a stage met its goals of speed; true for stages without such goals."""
    missed = [figure for figure in outcome.get("figures", []) if figure["met"] is False and figure["speed"]]
    return not missed and (name not in SPEED or not {"cut", "error"} & outcome.keys())


def print_stage(name: str, outcome: dict[str, Any]) -> None:
    print(f"## {name} ({outcome['seconds']} s)")
    for figure in outcome.get("figures", []):
        goal = "" if figure["goal"] is None else f"  goal {figure['goal']:g}"
        met = {None: "", True: "  holds", False: "  MISSED"}[figure["met"]]
        print(f"{figure['name']:44} {figure['value']:12.4g} {figure['unit']}{goal}{met}")
    for kind in ("skipped", "cut", "error"):
        if kind in outcome:
            print(f"{kind}: {outcome[kind]}")
    sys.stdout.flush()


def machine(device: str) -> str:
    """The GPU's name, memory and driver, or the CPU."""
    if device == "cpu":
        return f"{platform.machine()}, {os.cpu_count()} cores, no GPU"
    asked = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"unknown GPU ({error})"


if __name__ == "__main__":
    sys.exit(main())
