"""The output of `homing explain`."""

import io
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from homing.cluster.cli.explain import render, render_diff, request_body
from homing.cluster.cli.main import run
from homing.cluster.errors import ClusterError, SettingsError
from homing.cluster.output import plain
from homing.cluster.request_records import find_request, one

SCORE = {
    "replica_id": "r0",
    "feed": "live",
    "held_blocks": 61,
    "expected_blocks": 62,
    "uncached_tokens": 17,
    "queued_prefill_tokens": 300,
    "running": 2,
    "waiting": 1,
    "expected_ttft_s": 0.0123,
    "chosen": True,
    "why": "least expected time to first token",
}
OTHER = {**SCORE, "replica_id": "r1", "chosen": False, "expected_ttft_s": None, "why": "draining"}
FOUND = {
    "policy": "expected-ttft",
    "chosen": "r0",
    "reason": "prefix",
    "why": SCORE["why"],
    "prompt_tokens": 1009,
    "prompt_blocks": 63,
    "replicas": [SCORE, OTHER],
}


def page(found: dict[str, Any]) -> str:
    return plain(*render(found))


def test_every_replica_is_a_line_and_the_choice_is_marked() -> None:
    """An on-call engineer can see what was compared and why one replica won."""
    lines = page(FOUND).splitlines()

    assert lines[0].startswith("1009 tokens in 63 full blocks")
    assert lines[3].split()[:9] == ["→", "r0", "live", "61", "62", "17", "300", "2", "1"]
    assert "12.3 ms" in lines[3]
    assert lines[4].split() == ["r1", "live", "61", "62", "17", "300", "2", "1", "-", "draining"]
    assert lines[-1] == "→ r0 (prefix): least expected time to first token"


def test_a_departure_is_named_by_token_place_and_text() -> None:
    """The output shows what to change in a client so that its prompts keep a common prefix."""
    departure = {"token": 812, "at": "messages[3]", "text": "dog", "instead_of": "cat", "exact": True}
    found = {"tokens": [900, 901], "common_tokens": 812, "departure": departure}
    by_blocks = {**departure, "instead_of": None, "exact": False}

    assert render_diff(found).splitlines() == [
        "900 and 901 tokens, the first 812 of them in common",
        "",
        "departs at token 812, in messages[3]: 'dog'",
        "instead of: 'cat'",
    ]
    assert render_diff({**found, "departure": None}) == "900 and 901 tokens, the first 812 of them in common"
    assert "departs at the block of token 812, in messages[3]: 'dog'" in page({**FOUND, "departure": by_blocks})


def test_the_tutorial_shows_what_is_printed() -> None:
    """The tutorial's sample is a copy, and the columns keep changing."""
    tutorial = (Path(__file__).parents[3] / "docs" / "tutorial.md").read_text()
    sample = next(part for part in tutorial.split("```") if "full blocks" in part).strip().splitlines()[2:]
    printed = page(FOUND).splitlines()

    def shape(line: str) -> list[str]:
        return re.split(r"\s{2,}", re.sub(r"[\d.]+", "0", line.strip()))

    assert [shape(line) for line in (sample[0], sample[2])] == [shape(line) for line in (printed[0], printed[2])]
    assert shape(sample[-1]) == shape(printed[-1])
    assert sorted(len(shape(line)) for line in sample[3:5]) == sorted(len(shape(line)) for line in printed[3:5])


def test_one_block_is_not_many() -> None:
    """The demo's first prompt has one block."""
    assert page({**FOUND, "prompt_blocks": 1}).startswith("1009 tokens in 1 full block ·")


def test_a_held_request_goes_nowhere() -> None:
    """Holding a request for late binding is a decision too."""
    held = {**FOUND, "chosen": None, "why": "held: r0 saturated"}

    assert page(held).splitlines()[-1] == "→ no replica yet, held: r0 saturated"


def test_a_question_is_a_prompt_or_a_body(tmp_path: Path) -> None:
    """Exactly one of them must be given; a mistake names the file."""
    body = tmp_path / "body.json"
    body.write_text(json.dumps({"prompt": "x"}))

    assert request_body("hi", None, raw=False) == {"messages": [{"role": "user", "content": "hi"}]}
    assert request_body("hi", None, raw=True) == {"prompt": "hi"}
    assert request_body(None, str(body), raw=False) == {"prompt": "x"}
    for prompt, file in ((None, None), ("hi", str(body)), (None, str(tmp_path)), (None, str(tmp_path / "none"))):
        with pytest.raises(SettingsError):
            request_body(prompt, file, raw=False)


def test_a_file_that_is_no_json_is_told_so(tmp_path: Path) -> None:
    """The parser's position does not help if the wrong file was given."""
    body = tmp_path / "README.md"
    body.write_text("# no JSON")

    with pytest.raises(SettingsError, match="is not valid JSON"):
        request_body(None, str(body), raw=False)


def test_with_several_models_the_flag_that_names_one_is_in_the_message(refusing: str) -> None:
    """The router's message refers to its API, but the user has a command line."""
    words = ["explain", "--url", refusing, "hi"]

    with pytest.raises(SettingsError, match=r"say which: fox, owl; name one with --served-model-name"):
        run(words, io.StringIO())
    with pytest.raises(ClusterError) as caught:
        run([*words, "--served-model-name", "ox"], io.StringIO())
    assert not isinstance(caught.value, SettingsError)


def test_without_a_key_the_flag_that_gives_one_is_in_the_message() -> None:
    """The router's message speaks of a header, but the user has a command line."""

    def answer(_path: str, _body: object) -> tuple[int, object]:
        return 401, {"error": {"message": "this server requires an API key"}}

    with answering(answer) as url, pytest.raises(ClusterError, match=r"requires an API key; .* --api-key-file"):
        run(["explain", "--url", url, "hi"], io.StringIO())


def test_two_files_are_compared(tmp_path: Path) -> None:
    """The command sends both requests, because the router has the template and the tokenizer."""
    one, other = tmp_path / "a.json", tmp_path / "b.json"
    one.write_text('{"prompt": "x"}')
    other.write_text('{"prompt": "y"}')
    departure = {"token": 1, "at": None, "text": "y", "instead_of": "x", "exact": True}
    out, asked = io.StringIO(), list[tuple[str, object]]()

    def answer(path: str, body: object) -> tuple[int, object]:
        asked.append((path, body))
        return 200, {"tokens": [2, 2], "common_tokens": 1, "departure": departure}

    with answering(answer) as url:
        assert run(["explain", "--url", url, "--diff", str(one), str(other)], out) == 0
        with pytest.raises(SettingsError, match="--diff"):
            run(["explain", "--url", url, "--diff", str(one), str(tmp_path / "none")], io.StringIO())

    assert asked == [("/explain/diff", {"a": {"prompt": "x"}, "b": {"prompt": "y"}})]
    assert "departs at token 1: 'y'" in out.getvalue()


RECORD = {
    "id": "a/1",
    "at": 0.0,
    "method": "POST",
    "path": "/v1/completions",
    "state": "finished",
    "status": 200,
    "error": None,
    "tenant": "team-a",
    "model": "fox",
    "session": "s\x1b[2J",
    "agent": None,
    "parent": None,
    "times": {
        "receive_s": 0.5,
        "queue_s": 0.001,
        "prefill_s": 0.25,
        "decode_s": 2.0,
        "blocked_s": 0.0,
        "total_s": 2.251,
    },
    "ttft_s": 0.251,
    "expected_ttft_s": 0.2,
    "prompt_tokens": 1009,
    "predicted_tokens": 992,
    "cached_tokens": 976,
    "output_tokens": 7,
    "departure": [980, "messages[3]"],
    "choices": [
        {
            "replica": "r0",
            "state": "finished",
            "waits_for": "",
            "silent_s": None,
            "missing": {
                "token": 976,
                "reason": "evicted",
                "why": "r1 evicted it",
                "replica": "r1",
                "at": 60.0,
                "request": "big",
                "tenant": None,
            },
            "decisions": [{**FOUND, "at": 0.0, "hidden": 3}],
        }
    ],
    "hidden": 0,
}


def test_a_request_that_was_sent_is_explained_by_its_id() -> None:
    """The router that has it answers; foreign text moves no cursor."""
    out = io.StringIO()
    missing = {"error": {"message": "there is no request"}}

    def answer(path: str, _body: object) -> tuple[int, object]:
        return (200, RECORD) if path == "/requests/a%2F1" else (404, missing)

    with answering(answer) as url:
        assert run(["explain", "--url", url, "--request", "a/1"], out) == 0
        with pytest.raises(ClusterError, match="there is no request"):
            run(["explain", "--url", url, "--request", "b"], out)
        with pytest.raises(SettingsError, match="give no prompt"):
            run(["explain", "--url", url, "--request", "b", "hi"], out)
        assert find_request([url, f"{url}/elsewhere", url], "a/1", "") == RECORD

    lines = out.getvalue().splitlines()
    assert lines[1] == "tenant team-a · model fox · session s?[2J"
    assert lines[2] == "2.25 s in all: receive 500.0 ms, queue 1.0 ms, prefill 250.0 ms, decode 2.00 s"
    assert lines[3].startswith(
        "1009 prompt tokens, 976 cached (992 predicted), 7 tokens generated · first token after 251.0"
    )
    assert "3 candidates not shown" in lines[5]
    assert lines[7].split()[:3] == ["→", "r0", "live"]
    assert lines[9] == "→ r0 (prefix): least expected time to first token"
    assert re.fullmatch(
        r"not cached from token 976 on \(evicted\): r1 evicted it at [\d:]{8}, probably for request big", lines[10]
    )
    assert lines[11] == "its session's prompts differ from token 980 on, in messages[3]"


def test_a_refused_request_tells_the_limit() -> None:
    """It has no decision."""
    error = {"code": "rate_limit_exceeded", "message": "too many", "limit": "max_running"}
    refused = RECORD | {"error": error, "choices": [], "departure": None, "status": 429, "state": "refused"}

    text = plain(*one(refused))

    assert "refused with 429" in text
    assert "rate_limit_exceeded (limit: max_running): too many" in text
    assert "prompt tokens" not in text


@pytest.fixture
def refusing() -> Iterator[str]:
    """The address of a router that serves several models."""
    message = "field 'model': several models are served here, say which: fox, owl"
    with answering(lambda _path, _body: (400, {"error": {"message": message}})) as url:
        yield url


@contextmanager
def answering(answer: Callable[[str, object], tuple[int, object]]) -> Iterator[str]:
    """The address of a router that answers requests with `answer`."""

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.respond(json.loads(self.rfile.read(int(self.headers["content-length"]))))

        def do_GET(self) -> None:
            self.respond(None)

        def do_DELETE(self) -> None:
            self.respond(None)

        def respond(self, given: object) -> None:
            status, body = answer(self.path, given)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()
