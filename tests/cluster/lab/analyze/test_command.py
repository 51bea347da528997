"""`homing analyze` as a user runs it: small logs in; tables, JSON and plots out."""

import gzip
import io
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from homing.cluster.cli.main import run
from homing.cluster.config import load_settings
from homing.cluster.errors import ClusterError, LogUnreadable, ModelUnavailable, PlotFailed, SettingsError
from homing.cluster.lab.analyze.command import Options, Sample, analyze, paced
from homing.cluster.lab.analyze.order import Part
from homing.cluster.lab.analyze.prompts import AnalyzedPrompt
from homing.replica.demo import demo_model_path
from homing.router.text.template import TemplateInput
from homing.router.text.tokenizer import TextModel

RULES = " ".join(f"Rule {number}: be kind in matter {number * 37}." for number in range(30))


def trace_line(at_ms: int, blocks: str, tokens: int | None = None) -> str:
    """A trace line: blocks of four tokens, each named by a letter, and by default one further token."""
    length = 4 * len(blocks) + 1 if tokens is None else tokens
    ids = [ord(letter) for letter in blocks] + [1000 + at_ms] * (length > 4 * len(blocks))
    return json.dumps({"timestamp": at_ms, "input_length": length, "output_length": 1, "hash_ids": ids})


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two interleaved conversations, then an unrelated prompt."""
    path = tmp_path / "trace.jsonl"
    lines = ["ab", "xy", "abc", "xyz", "abcd", "q"]
    path.write_text("\n".join(trace_line(1000 * at, blocks) for at, blocks in enumerate(lines)) + "\n")
    return path


def chat_line(number: int, system: str) -> str:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": f"Question {number}?"}]
    return json.dumps({"timestamp": number, "model": "m", "messages": messages})


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """Twenty chats with a time stamp before the rules."""
    path = tmp_path / "requests.jsonl"
    systems = [f"It is 2026-11-21 12:{number + 10}:{number + 11}. {RULES}" for number in range(20)]
    path.write_text("\n".join(chat_line(number, system) for number, system in enumerate(systems)))
    return path


def ran(*words: str | Path) -> str:
    out = io.StringIO()
    assert run(["analyze", *map(str, words)], out) == 0
    return out.getvalue()


def ran_json(*words: str | Path) -> dict[str, Any]:
    return json.loads(ran(*words, "--json"))


def test_a_trace_is_summarized_in_figures(trace: Path):
    """All numbers can be counted by hand."""
    told = ran_json(trace, "--block-size", "4", "--sizes", "4,8", "--replicas", "1,2")

    assert (told["format"], told["requests"], told["prompt_tokens"]) == ("mooncake", 6, 66)
    assert (told["full_blocks"], told["distinct_blocks"], told["shared_blocks"]) == (15, 8, 5)
    assert (told["potential_saved_tokens"], told["span_s"], told["skipped"]) == (28, 5.0, 0)
    assert [row["blocks"] for row in told["sizes"]] == [4, 8]
    assert told["sizes"][1]["share"] == pytest.approx(28 / 66)
    assert {row["rule"] for row in told["sizes"][0]["replicas"]} == {"affine", "round-robin"}
    assert told["working_set"][0] == {"window_s": 60.0, "peak_blocks": 8, "mean_blocks": pytest.approx(32 / 6)}
    assert told["advice"] is None


def test_the_table_names_what_a_person_looks_for(trace: Path):
    """Savings, working set, recommendation, sizes, replicas, the place where sharing ends, and advice."""
    told = ran(trace, "--block-size", "4", "--bytes-per-block", "1GiB", "--kv-memory", "4.5GiB", "--prefill-rate", "2")

    for expected in (
        "potential savings    28 prompt tokens (42.4 %) if nothing is evicted, 14 s of prefill",
        "working set",
        "8 GiB",
        "GPUs with 4,831,838,208 bytes for KV, 3 blocks each",
        "8 round-robin",
        "where sharing ends",
        "this log has no text",
    ):
        assert expected in told.replace("8.00 GiB", "8 GiB"), told


def test_requests_are_tokenized_and_advice_is_given(chats: Path):
    """Uses the demo model's tokenizer and template, so that the numbers match its cluster."""
    told = ran_json(chats)

    assert (told["format"], told["block_size"], told["requests"]) == ("openai", 16, 20)
    (finding,) = told["advice"]
    assert (finding["kind"], finding["part"]) == ("time", "messages[0] (system)")
    assert finding["saved_share"] > 0.5
    assert finding["then_tokens"] > 10 * finding["now_tokens"]


def test_tokens_are_those_of_the_model(chats: Path):
    """Counted by the same code that tokenizes served requests."""
    text = TextModel.load(demo_model_path(), cache_bytes=0)
    request = json.loads(chats.read_text().splitlines()[0])
    expected = len(text.encode_chat_now(TemplateInput(request["messages"])))
    text.close()

    one = chats.with_name("one.jsonl")
    one.write_text(chats.read_text().splitlines()[0])
    assert ran_json(one)["prompt_tokens"] == expected


def test_snippets_are_shown_unless_told_otherwise(chats: Path):
    """Some logs must not be quoted."""
    assert "12:10:11" in ran(chats)
    assert "12:10:11" not in ran(chats, "--no-snippets")


def test_models_and_salts_share_nothing(tmp_path: Path):
    """As in a running cluster."""
    path = tmp_path / "log.jsonl"
    bodies = [{"prompt": RULES}, {"prompt": RULES, "model": "b"}, {"prompt": RULES, "cache_salt": "s"}]
    path.write_text("\n".join(map(json.dumps, [*bodies, bodies[2]])))

    told = ran_json(path)

    assert told["sharing_requests"] == 1


def test_a_packed_log_and_standard_input_are_read_alike(trace: Path):
    """Logs are often compressed, or read from a pipe."""
    packed = trace.with_suffix(".jsonl.gz")
    packed.write_bytes(gzip.compress(trace.read_bytes()))
    out = io.StringIO()
    stdin = io.BufferedReader(io.BytesIO(packed.read_bytes()))

    analyze(Options("-", block_size=4, as_json=True), load_settings({}, {}), out, err=io.StringIO(), stdin=stdin)

    plain, unpacked, piped = (
        ran_json(trace, "--block-size", "4"),
        ran_json(packed, "--block-size", "4"),
        json.loads(out.getvalue()),
    )
    assert piped.pop("log") == "standard input"
    assert {**plain, "log": None} == {**unpacked, "log": None} == {**piped, "log": None}


def test_a_damaged_packed_log_is_an_error_in_one_line(trace: Path):
    """As after an interrupted copy."""
    packed = bytearray(gzip.compress(trace.read_bytes() * 100))
    packed[12:20] = bytes(8)
    damaged = trace.with_suffix(".jsonl.gz")
    damaged.write_bytes(packed)

    with pytest.raises(LogUnreadable, match="cannot be read"):
        ran(damaged, "--block-size", "4")


@pytest.mark.parametrize("suffix", [".png", ".svg", ".html"])
def test_a_plot_is_drawn(trace: Path, suffix: str):
    """The plot marks the working set and the recommendation."""
    path = trace.with_suffix(suffix)

    ran(trace, "--block-size", "4", "--plot", path)

    assert path.stat().st_size > 1000
    if suffix != ".png":
        assert "recommended: " in path.read_text()


def test_blocks_may_be_larger_than_those_of_a_cluster(trace: Path):
    """Traces have 512 tokens per id, while a cluster's setting is at most 256."""
    trace.write_text(json.dumps({"timestamp": 0, "input_length": 2048, "output_length": 1, "hash_ids": [7, 8]}))

    assert ran_json(trace, "--block-size", "1024")["full_blocks"] == 2


def test_the_end_says_how_fast_it_went() -> None:
    """Users can estimate the time for a longer log."""
    err, seconds = io.StringIO(), iter(range(100))
    prompts = [AnalyzedPrompt(1, [])] * 3

    assert list(paced(prompts, err, lambda: float(next(seconds)))) == prompts
    assert err.getvalue() == "3 requests in 1.0 s (180 a minute)\n"


def test_malformed_lines_are_refused_or_counted(trace: Path):
    """The error names the line and the option to skip it."""
    trace.write_text(trace.read_text() + "{broken\n")

    with pytest.raises(LogUnreadable, match=r"line 7.*--skip-malformed"):
        ran(trace, "--block-size", "4")
    assert ran_json(trace, "--block-size", "4", "--skip-malformed")["skipped"] == 1


def test_what_the_template_refuses_is_named_or_counted(chats: Path, tmp_path: Path):
    """A chat that could not be served has no tokens."""
    folder = tmp_path / "no_template"
    shutil.copytree(demo_model_path(), folder, ignore=shutil.ignore_patterns("*.jinja", "*.safetensors"))
    chats.write_text(json.dumps({"prompt": "hi"}) + "\n" + chats.read_text())

    with pytest.raises(LogUnreadable, match=r"line 2: this model has no chat template.*--skip-malformed"):
        ran(chats, "--tokenizer", folder)
    told = ran_json(chats, "--tokenizer", folder, "--skip-malformed")
    assert (told["requests"], told["skipped"]) == (1, 20)


def test_a_folder_without_a_tokenizer_is_named(chats: Path, tmp_path: Path):
    """A configuration alone is enough to size blocks, but not to tokenize text."""
    config = tmp_path / "config.json"
    shutil.copy(demo_model_path() / "config.json", config)

    with pytest.raises(ModelUnavailable, match="--tokenizer"):
        ran(chats, "--model", config)
    told = ran_json(chats, "--model", config, "--tokenizer", demo_model_path())
    assert told["bytes_per_block"] == 2 * 16 * 4 * 32 * 4 * 4  # keys and values, tokens, heads, sizes, bytes, layers


@pytest.mark.parametrize(
    ("words", "error", "said"),
    [
        (["no-such-file"], LogUnreadable, "no-such-file cannot be read: No such file"),
        (["{trace}"], LogUnreadable, "blocks of 512; give the number of tokens per id, such as --block-size 4"),
        (["{trace}", "--format", "openay"], SettingsError, "did you mean openai"),
        (["{trace}", "--sizes", "1k,lots"], SettingsError, "--sizes: 'lots'"),
        (["{trace}", "--replicas", "0"], SettingsError, "--replicas: '0' must be at least 1"),
        (["{trace}", "--replicas", "1000"], SettingsError, "--replicas: at most 256"),
        (["{trace}", "--plot", "x.gif"], PlotFailed, "x.gif"),
        (["{trace}", "--block-size", "4", "--kv-memory", "1GB"], SettingsError, "--bytes-per-block"),
        (["{trace}", "--format", "openai"], LogUnreadable, "neither field 'messages' nor"),
        (["{empty}"], LogUnreadable, "contains no requests"),
    ],
)
def test_a_mistake_is_named(trace: Path, words: Sequence[str], error: type[ClusterError], said: str):
    """The error says what is wrong and what to do."""
    empty = trace.with_name("empty.jsonl")
    empty.write_text("\n\n")

    with pytest.raises(error) as caught:
        ran(*(word.format(trace=trace, empty=empty) for word in words))

    assert said in str(caught.value)


def test_the_console_script_prints_to_both_streams(trace: Path):
    """The report goes to standard output and the speed to standard error, so that a pipe gets only the report."""
    command = [sys.executable, "-m", "homing.cluster.cli.main", "analyze", str(trace), "--block-size", "4"]

    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    failed = subprocess.run([*command[:-1], "x"], capture_output=True, text=True, timeout=120, check=False)

    assert (done.returncode, failed.returncode) == (0, 2)
    assert done.stdout.startswith("trace.jsonl · mooncake · blocks of 4 tokens")
    assert done.stderr.startswith("6 requests in ")
    assert failed.stderr.startswith("homing: --block-size: 'x'")


def test_a_sample_holds_each_prompt_with_the_same_chance():
    """Otherwise the advice would depend on a prompt's position in the log."""
    taken = [0] * 20
    for seed in range(2000):
        sample = Sample(5, random.Random(seed))
        for number in range(20):
            sample.offer(AnalyzedPrompt(number, (), parts=(Part("prompt", "x"),)), 0)
        for prompt in sample.prompts:
            taken[prompt.tokens] += 1

    assert all(400 < count < 600 for count in taken)
