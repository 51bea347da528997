"""Commands and snippets of README.md and docs/clients.md as a newcomer types them: each is run, or at least parsed."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

from homing.cluster.cli.main import parse
from homing.cluster.registry import wait_gone

from .running import Serving, environment, orphaned_folders, ready_note, shared_memory, until

ROOT = Path(__file__).resolve().parents[2]
README, CLIENTS = (ROOT / "README.md").read_text(), (ROOT / "docs" / "clients.md").read_text()
PAGES = README + CLIENTS
ADDRESS = "http://127.0.0.1:8000"

console = re.findall(r"```console\n(.*?)```", PAGES, re.DOTALL)
commands = [
    line.removeprefix("$ ") for block in console for line in re.findall(r"^\$ .*(?:\n(?!\$).+)*", block, re.MULTILINE)
]
python = re.findall(r"```python\n(.*?)```", PAGES, re.DOTALL)


def named(word: str) -> list[list[str]]:
    """The arguments of every command whose program name ends with `word`."""
    split = [shlex.split(command, comments=True) for command in commands]
    return [words for words in split if words[0].endswith(word)]


@pytest.mark.cluster
def test_the_curl_lines_get_a_story_and_json(cluster: Serving) -> None:
    """These are the first requests that a newcomer sends."""
    answers = []
    for words in named("curl"):
        done = subprocess.run(
            [word.replace(ADDRESS, cluster.url) for word in [*words, "--silent", "--noproxy", "*"]],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        answers.append(json.loads(done.stdout)["choices"][0]["message"]["content"])

    *stories, structured = answers
    assert len(stories) == 2  # the README's and that of the clients' page
    assert all("fox" in story for story in stories)
    assert f"`{structured}`" in PAGES


@pytest.mark.cluster
def test_the_openai_snippets_print_a_story_and_use_a_tool(cluster: Serving) -> None:
    """The snippets are meant to be pasted one after the other: the README's, then those of the clients' page."""
    snippets = [code for code in python if "client" in code]
    shown = re.findall(r"  # (.+)", "".join(snippets))

    done = subprocess.run(
        [sys.executable, "-P", "-c", "".join(snippets).replace(ADDRESS, cluster.url)],
        env=environment(cluster.state) | {"NO_PROXY": "*"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    *stories, _, _ = lines = done.stdout.splitlines()
    assert len(stories) == 2
    assert all("fox" in story for story in stories)
    assert lines[2:] == shown
    assert len(shown) == 2


@pytest.mark.cluster
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_the_tool_call_is_the_same_as_a_stream(cluster: Serving, choice: str) -> None:
    """A forced call and one that the model chooses are equal; the client assembles both from a stream."""
    function = {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
    with (
        cluster.client() as client,
        client.chat.completions.stream(
            model="demo",
            messages=[{"role": "user", "content": "What is the weather in Oxford?"}],
            tools=[{"type": "function", "function": function}],
            tool_choice=choice,
            temperature=0,
        ) as stream,
    ):
        (chosen,) = stream.get_final_completion().choices

    (call,) = chosen.message.tool_calls
    assert chosen.finish_reason == "tool_calls"
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Oxford"})


@pytest.mark.cluster
def test_a_schema_is_filled_as_a_stream(cluster: Serving) -> None:
    """The client's stream helper accepts a class as the schema."""

    class Person(BaseModel):
        city: str
        name: str
        age: int

    with (
        cluster.client() as client,
        client.chat.completions.stream(
            model="demo",
            messages=[{"role": "user", "content": "Extract the person: Anna is 31 years old and lives in Rome."}],
            response_format=Person,
            temperature=0,
        ) as stream,
    ):
        (chosen,) = stream.get_final_completion().choices

    assert chosen.message.parsed == Person(city="Rome", name="Anna", age=31)


@pytest.mark.cluster
def test_the_subscriber_snippet_prints_what_a_replica_holds(cluster: Serving, tmp_path: Path) -> None:
    """A late subscriber first receives the current state."""
    (snippet,) = [code for code in python if "follow_sync" in code]
    cluster.post("/v1/completions", {"prompt": "Once upon a time " * 40, "max_tokens": 1})
    code = snippet.replace(ADDRESS, cluster.url)
    printed = tmp_path / "printed"

    with (
        printed.open("w") as out,
        subprocess.Popen(
            [sys.executable, "-P", "-c", code], env=environment(cluster.state) | {"NO_PROXY": "*"}, stdout=out
        ) as process,
    ):
        try:
            until(lambda: "Stored(" in printed.read_text() or None, "a stored block is printed")
        finally:
            process.kill()


@pytest.mark.cluster
def test_the_other_snippets_of_clients_get_a_story(cluster: Serving) -> None:
    """Anthropic's package and LangChain, configured as the page says."""
    code = "\n".join(code for code in python if "Anthropic(" in code or "ChatOpenAI(" in code)
    answers = "story.content[0].text, chat.invoke('Tell me a story about a fox.').content"
    shown = f"import json; print(json.dumps([{answers}]))"

    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-c", f"{code}\n{shown}".replace(ADDRESS, cluster.url)],
        env=environment(cluster.state) | {"NO_PROXY": "*"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    # They are drawn, so one may have several lines, or no fox.
    assert [len(story) > 20 for story in json.loads(done.stdout)] == [True] * 2


def test_every_homing_command_is_understood() -> None:
    """A renamed flag must be renamed in the README, too."""
    found = named("homing")

    assert len(found) >= 3
    for words in found:
        invocation = parse(words[1:])
        if "config" not in invocation.flags:  # the reader provides the file
            assert invocation.settings


@pytest.mark.cluster
@pytest.mark.skipif(not (ROOT / ".venv/.runtime").exists(), reason="not set up by make")
def test_make_serve_serves_and_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    """The README's first command, stopped as in a terminal: Ctrl-C signals the whole process group."""
    before = orphaned_folders()
    with subprocess.Popen(
        ["make", "serve", "ARGS=--port 0 --replicas 1"],
        cwd=ROOT,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        note = until(lambda: ready_note(tmp_path, process), "the banner")
        family = Serving(tmp_path, note["url"], process.pid, None).family()
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=120)

    assert "homing is ready" in output
    assert "curl http://127.0.0.1:" in output
    assert wait_gone(family, 10) == []
    assert shared_memory(family) == []
    assert not Path(note["run_dir"]).exists()
    until(lambda: True if orphaned_folders() <= before else None, "no folder is left")
