"""Every kernel compiles for GPUs that this machine lacks, and needs few variants."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile.py")
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="the kernels need Triton")


def compiled(*flags: str, script: Path = SCRIPT) -> subprocess.CompletedProcess[str]:
    """Run the script in its own process, because tests of kernels enable Triton's interpreter in theirs."""
    return subprocess.run([sys.executable, str(script), *flags], capture_output=True, text=True, check=False)


def test_a_decode_step_launches_little_and_reads_its_weights_once() -> None:
    """Each launch adds about 2 us to a step, which for a small model is as long as reading its weights."""
    done = compiled(script=SCRIPT.with_name("launches.py"))

    assert done.returncode == 0, done.stderr
    found = re.findall(r"(\S+): (\d+) launches per layer and (\d+) more, ([\d.]+) GB", done.stdout)
    assert [name for name, *_ in found] == ["Qwen3-0.6B", "Qwen3-8B"]
    for (_, per_layer, rest, gigabytes), weights in zip(found, (1.2, 15.2), strict=True):
        assert int(per_layer) <= 9
        assert int(rest) <= 10
        assert weights < float(gigabytes) < weights + 0.9


def test_no_kernel_is_compiled_while_a_replica_serves() -> None:
    """A compilation stops all requests for up to a second. Every kernel that the package launches is covered."""
    done = compiled(script=SCRIPT.with_name("late_kernels.py"))

    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.count("compiled while serving: none") == 5
    assert "never launched: none" in done.stdout


def test_no_thread_overwrites_a_length_that_others_have_yet_to_read() -> None:
    """The interpreter has no threads. A late warp would copy one page too many of the row's block table."""
    done = compiled(script=SCRIPT.with_name("hazards.py"))

    assert done.returncode == 0, done.stderr[-3000:]
    assert re.findall(r"_decode_rows: (\d+) read and written", done.stdout) == ["1", "1"]
    assert set(re.findall(r"(\d+) races", done.stdout)) == {"0"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kernels_compile_for_every_architecture_without_large_spills(tmp_path: Path, monkeypatch) -> None:
    """The interpreter accepts code that the compiler rejects, and reports neither registers nor shared memory."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    done = compiled()

    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert all(f"sm_{arch} " in done.stdout for arch in (80, 86, 89, 90, 100))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_calls_of_flash_attn_4_compile() -> None:
    """A fake with its signature cannot show what it rejects at compile time, such as splits of keys on sm_90."""
    done = compiled("--quick", script=SCRIPT.with_name("compile_flash4.py"))

    if "not installed" in done.stdout:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert all(f"sm_{arch} " in done.stdout for arch in (90, 100))
