"""Run popular load generators and an evaluation tool against a cluster of our own, and check their reports.

Run as `python -m tests.clients.run` (`make clients`). Downloads nothing but the tools' packages: model and tokenizer
are the demo model's, prompts are synthetic or in this folder. A tool that cannot be installed or run gets a line in the
table with the reason, and the exit code is 1.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from homing.replica.demo import demo_model_path

from .environments import Environment, NotInstallableError
from .reports import Reading, faults
from .runs import RUNS, TOOLS, Run

HERE = Path(__file__).resolve().parent
HOMING = [sys.executable, "-P", "-m", "homing.cluster.cli.main"]
NAME = "clients"
#: Only to catch hangs: a run takes seconds, most of them for imports.
PATIENCE_S = 600.0

HEADER = ("run", "version", "requests", "failed", "output tokens", "cached tokens", "score", "")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One line of the table."""

    run: Run
    version: str
    reading: Reading | None
    faults: tuple[str, ...]
    text: str = ""


class RunFailedError(Exception):
    """A tool exited with an error or without a report."""


@contextmanager
def cluster(state: Path) -> Iterator[str]:
    """Run a cluster for the duration of the block; yields its URL."""
    named = ["--name", NAME, "--state-dir", str(state)]
    subprocess.run([*HOMING, "serve", "--port", "0", "--detach", *named], check=True, stdout=subprocess.DEVNULL)
    try:
        yield str(json.loads((state / f"{NAME}.json").read_text())["url"])
    finally:
        subprocess.run([*HOMING, "stop", *named], check=True, stdout=subprocess.DEVNULL)


def hub_cache(at: Path) -> None:
    """Make the demo model look downloaded: offline, aiperf loads a tokenizer only from the Hub's cache."""
    repository = at / "hub" / "models--homing--demo"
    snapshot = repository / "snapshots" / "shipped"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("shipped")
    for file in demo_model_path().iterdir():
        (snapshot / file.name).symlink_to(file)


def offline(hub: Path) -> dict[str, str]:
    """The environment variables of every tool: no downloads, no telemetry."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "COLUMNS")}
    quiet = {"DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false", "NO_COLOR": "1"}
    return kept | quiet | {"HF_HOME": str(hub), "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none", "COLUMNS": "120"}


def carry_out(run: Run, environment: Environment, url: str, scratch: Path) -> tuple[Reading, str]:
    """The reading of one run and the tool's output. Raises RunFailedError."""
    out = scratch / run.name
    out.mkdir()
    places = {"url": url, "model": str(demo_model_path()), "out": str(out), "here": str(HERE)}
    program, *arguments = [word.format(**places) for word in run.command]
    # In the tasks' folder, because a task names its data file relative to that.
    done = subprocess.run(
        [str(environment.bin / program), *arguments],
        cwd=HERE / "tasks",
        env=offline(scratch / "hub"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    written = sorted(out.glob(run.report))
    if done.returncode or not written:
        raise RunFailedError(
            f"exited with {done.returncode}; its last lines:\n" + "\n".join(done.stdout.splitlines()[-40:])
        )
    return run.reader(json.loads(written[-1].read_text())), done.stdout


def kept_text(run: Run, output: str, places: Sequence[tuple[str, str]]) -> str:
    """The command and the tables it printed, without this machine's paths, progress bars and colours."""
    plain = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", output)
    lines = [line.rpartition("\r")[2].rstrip() for line in plain.splitlines()]
    start = next((index for index, line in enumerate(lines) if run.shown_from in line), 0)
    text = "\n".join(["$ " + " ".join(run.command), "", *lines[start:]])
    for machine, word in places:
        text = text.replace(machine, word)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def outcome(run: Run, environment: Environment, url: str, scratch: Path) -> Outcome:
    """Carry out one run; failures become part of the outcome."""
    try:
        version = environment.version(TOOLS[run.tool].package)
        reading, output = carry_out(run, environment, url, scratch)
    except (RunFailedError, NotInstallableError, subprocess.TimeoutExpired) as error:
        return Outcome(run, "", None, (str(error),))
    places = [
        (str(scratch / run.name), "{out}"),
        (str(HERE), "{here}"),
        (url, "{url}"),
        (str(demo_model_path()), "{model}"),
    ]
    return Outcome(run, version, reading, tuple(faults(reading, run.expected)), kept_text(run, output, places))


def row(outcome: Outcome) -> tuple[str, ...]:
    """A row of the table."""
    verdict = "; ".join(outcome.faults).splitlines()[0] if outcome.faults else "ok"
    reading = outcome.reading
    if reading is None:
        return (outcome.run.name, "", "", "", "", "", "", verdict)
    told = (reading.requests, reading.failed, reading.output_tokens, reading.cached_tokens, reading.score)
    return (outcome.run.name, outcome.version, *("–" if each is None else f"{each:g}" for each in told), verdict)


def table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with even columns."""
    widths = [max(len(each[column]) for each in rows) for column in range(len(HEADER))]
    lines = [
        "| " + " | ".join(word.ljust(width) for word, width in zip(each, widths, strict=True)) + " |" for each in rows
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def wanted(words: Sequence[str]) -> list[Run]:
    """The runs whose names begin with one of these words; all runs if there are no words."""
    return [run for run in RUNS if not words or run.name.startswith(tuple(words))]


def installed(runs: Sequence[Run], folder: Path, pip_flags: str) -> tuple[dict[str, Environment], dict[str, str]]:
    """Environments of the tools of these runs, and the reasons why others cannot be installed."""
    environments, missing = {}, {}
    for name in dict.fromkeys(run.tool for run in runs):
        environment = Environment(name, folder / name, TOOLS[name].with_dependencies)
        try:
            environment.make(pip_flags)
            environments[name] = environment
        except NotInstallableError as error:
            missing[name] = f"not installed: {error}"
    return environments, missing


def run_all(runs: Sequence[Run], environments: dict[str, Environment], missing: dict[str, str]) -> list[Outcome]:
    """Carry out all runs against one cluster, one after another."""
    done = []
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        hub_cache(scratch / "hub")
        with cluster(scratch / "state") as url:
            for run in runs:
                print(f"{run.name} ...", flush=True)
                if run.tool in missing:
                    done.append(Outcome(run, "", None, (missing[run.tool],)))
                    continue
                done.append(outcome(run, environments[run.tool], url, scratch))
                print("\n".join(done[-1].faults) or "ok", flush=True)
    return done


def keep(outcomes: Sequence[Outcome], folder: Path) -> None:
    """Write the outputs of completed runs and the table."""
    folder.mkdir(parents=True, exist_ok=True)
    for each in outcomes:
        if each.text:
            (folder / f"{each.run.name}.txt").write_text(each.text)
    (folder / "summary.md").write_text(table([HEADER, *map(row, outcomes)]) + "\n")


def main() -> int:
    """Install the tools, run them, check their reports and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="*", help="only runs whose names begin with one of these")
    parser.add_argument("--environments", type=Path, default=Path(".venv-clients"))
    parser.add_argument("--pip-flags", default="")
    parser.add_argument("--keep", type=Path, help="write the tools' outputs into this folder")
    given = parser.parse_args()
    runs = wanted(given.runs)
    environments, missing = installed(runs, given.environments.resolve(), given.pip_flags)
    outcomes = run_all(runs, environments, missing)
    print(table([HEADER, *map(row, outcomes)]))
    if given.keep:
        keep(outcomes, given.keep)
    return int(any(each.faults for each in outcomes))


if __name__ == "__main__":
    sys.exit(main())
