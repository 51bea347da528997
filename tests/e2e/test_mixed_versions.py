"""Upgrade and rollback: a router of the previous commit with a replica of this one, and the other way round."""

import io
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[2]
PART = Path(__file__).with_name("one_part.py")
PROMPT = "Once upon a time there was a fox who lived in the forest. " * 12
BODY = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0}


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders that contain the package `homing`: of this tree, and of the last commit before it that main had."""
    packed = subprocess.run(["git", "archive", "HEAD^"], cwd=ROOT, capture_output=True, check=False)
    if packed.returncode:
        pytest.skip("no earlier commit here")
    old, new = tmp_path_factory.mktemp("old"), tmp_path_factory.mktemp("new")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as tar:
        tar.extractall(old / "homing", filter="data")
    (new / "homing").symlink_to(ROOT)
    return {"this": new, "previous": old}


@contextmanager
def part(version: Path, *words: str) -> Iterator[str]:
    """Run a part until the end of the block; yields the line that it prints when it is ready."""
    with subprocess.Popen(
        [sys.executable, "-P", str(PART), *words],
        env={"PYTHONPATH": str(version), "PATH": "/usr/bin:/bin", "HOME": str(Path.home())},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            line = process.stdout.readline().strip()
            assert line, f"{words} of {version} did not start"
            yield line
        finally:
            process.stdin.close()
            process.wait(60)


@pytest.mark.cluster
@pytest.mark.slow
def test_parts_of_two_commits_serve_together_with_equal_answers_and_exact_hits(versions: dict[str, Path]) -> None:
    """docs/operations.md says that neighbouring versions may be mixed in an upgrade or a rollback."""
    answers = []
    for replica, router in (("this", "this"), ("this", "previous"), ("previous", "this")):
        with ExitStack() as stack:
            description = stack.enter_context(part(versions[replica], "replica"))
            port = stack.enter_context(part(versions[router], "router", description))
            client = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False))
            cold, warm = (client.post("/v1/completions", json=BODY).raise_for_status().json() for _ in range(2))
            (seen,) = client.get("/cluster").json()["replicas"]
            counted = client.get("/metrics").text

        prompt = warm["usage"]["prompt_tokens"]
        cached = warm["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= prompt - 16
        assert 'homing_predictions_total{model="demo",result="exact"} 2.0' in counted
        assert seen["feed"] == "live"
        answers += [cold["choices"][0]["text"], warm["choices"][0]["text"]]

    assert len(set(answers)) == 1
