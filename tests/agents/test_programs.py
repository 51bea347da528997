"""Unmodified agents from npm: each completes a task of ten tool calls, with an empty environment and its own home.

`make clients` installs them and passes their folder in `NPM_CLIENTS`; without it, these tests are skipped. The agents
run only the shell commands defined here.
"""

import itertools
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from .scripted import NAME, Engine, call
from .tasks import FOX

INSTALLED = os.environ.get("NPM_CLIENTS")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(INSTALLED is None, reason="the programs are installed by make clients"),
]
HERE = Path(__file__).parent
TURNS = 10
DONE = "All is done."
TASK = "Write ten lines into log.txt."
#: The shell command of each turn.
COMMAND = "echo line >> log.txt; wc -l < log.txt"
CODEX = """
model = "{name}"
model_provider = "homing"
approval_policy = "never"
sandbox_mode = "danger-full-access"
model_context_window = 200000
[model_providers.homing]
name = "homing"
base_url = "{url}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""


def run(folder: Path, *command: str, **environment: str) -> str:
    """Run a program with only HOME, PATH, TERM and `environment`; return its standard output."""
    assert INSTALLED is not None
    node = shutil.which("node")
    assert node is not None, "node is not installed"
    home = folder / "home"
    home.mkdir(exist_ok=True)
    program, *arguments = command
    done = subprocess.run(
        [f"{INSTALLED}/node_modules/.bin/{program}" if program != "node" else node, *arguments],
        cwd=folder,
        env={"HOME": str(home), "PATH": f"{Path(node).parent}:/usr/bin:/bin", "TERM": "dumb", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def objects(lines: str) -> list[Any]:
    return [json.loads(line) for line in lines.splitlines() if line.startswith("{")]


def extends(prompts: list[str]) -> bool:
    """Whether each prompt continues the previous one, so that all of that one is cached."""
    return all(later.startswith(earlier) for earlier, later in itertools.pairwise(prompts))


def test_codex(engine: Engine, tmp_path: Path) -> None:
    """Over Responses, with its own tools: functions, a namespace and a web search."""
    engine.play(*[call("exec_command", cmd=COMMAND, workdir=str(tmp_path))] * TURNS, DONE)
    (tmp_path / "home" / ".codex").mkdir(parents=True)
    (tmp_path / "home" / ".codex" / "config.toml").write_text(CODEX.format(name=NAME, url=engine.url))

    said = objects(run(tmp_path, "codex", "exec", "--json", "--skip-git-repo-check", TASK))

    items = [each["item"] for each in said if each["type"] == "item.completed"]
    assert [each.get("exit_code") for each in items if each["type"] == "command_execution"] == [0] * TURNS
    assert items[-1]["text"] == DONE
    assert (tmp_path / "log.txt").read_text() == "line\n" * TURNS
    assert len(engine.prompts) == TURNS + 1
    assert extends(engine.prompts)
    [used] = [each["usage"] for each in said if each["type"] == "turn.completed"]
    assert used["cached_input_tokens"] > 0.8 * used["input_tokens"]


def test_opencode(engine: Engine, tmp_path: Path) -> None:
    """Over chat completions; it also requests a title, without tools."""
    engine.play(*[call("bash", command=COMMAND, description="Add a line")] * TURNS, DONE, aside="Ten lines")
    options = {"baseURL": f"{engine.url}/v1", "apiKey": "k"}
    model = {"name": NAME, "limit": {"context": 200_000, "output": 8000}}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "homing", "options": options, "models": {NAME: model}}
    config = {
        "autoupdate": False,
        "share": "disabled",
        "model": f"homing/{NAME}",
        "provider": {"homing": provider},
        "permission": {"bash": "allow"},
    }
    (tmp_path / "opencode.json").write_text(json.dumps(config))

    said = objects(run(tmp_path, "opencode", "run", "--format", "json", TASK))

    calls = [each["part"] for each in said if each["type"] == "tool_use"]
    assert [each["state"]["status"] for each in calls] == ["completed"] * TURNS
    assert [each["part"]["text"] for each in said if each["type"] == "text"] == [DONE]
    assert (tmp_path / "log.txt").read_text() == "line\n" * TURNS
    assert extends([prompt for prompt in engine.prompts if "<tools>" in prompt])


def test_claude_code(engine: Engine, tmp_path: Path) -> None:
    """Over Messages; root may not skip its permissions, so the one tool is allowed by name."""
    engine.play(*[call("Bash", command=COMMAND, description="Add a line")] * TURNS, DONE, aside="Ten lines")
    environment = {
        "ANTHROPIC_BASE_URL": engine.url,
        "ANTHROPIC_AUTH_TOKEN": "k",
        "ANTHROPIC_MODEL": NAME,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": NAME,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }

    said = run(tmp_path, "claude", "-p", TASK, "--output-format", "json", "--allowedTools", "Bash", **environment)

    [result] = objects(said)
    assert (result["result"], result["is_error"]) == (DONE, False)
    assert (tmp_path / "log.txt").read_text() == "line\n" * TURNS
    assert result["usage"]["cache_read_input_tokens"] > 0.8 * result["usage"]["input_tokens"]


def test_qwen_code(engine: Engine, tmp_path: Path) -> None:
    """Over chat completions. Its first prompt contains an assistant turn, so turn 0 of the recording is not played."""
    turn = call("run_shell_command", command=COMMAND, is_background=False)
    engine.play(*[turn] * (TURNS + 1), DONE, aside="Ten lines")
    environment = {"OPENAI_BASE_URL": f"{engine.url}/v1", "OPENAI_API_KEY": "k", "OPENAI_MODEL": NAME}

    said = run(tmp_path, "qwen", "--auth-type", "openai", "--yolo", "-p", TASK, **environment)

    assert said.strip() == DONE
    assert (tmp_path / "log.txt").read_text() == "line\n" * TURNS


@pytest.mark.parametrize("kind", ["responses", "chat", "compatible", "messages"])
def test_vercels_ai_sdk(engine: Engine, tmp_path: Path, kind: str) -> None:
    """Ten streamed steps with each of its providers, and an object of a schema, which for Messages is a tool call."""
    assert INSTALLED is not None
    script = Path(INSTALLED) / "ai_sdk.mjs"  # placed where Node looks for the imports
    shutil.copy(HERE / "npm" / "ai_sdk.mjs", script)

    engine.play(*(call("add", line=line + 1) for line in range(TURNS)), DONE)
    [looped] = objects(run(tmp_path, "node", str(script), engine.url, NAME, kind, "loop"))
    engine.play(call("json", **json.loads(FOX)) if kind == "messages" else FOX)
    [made] = objects(run(tmp_path, "node", str(script), engine.url, NAME, kind, "object"))

    assert looped == {"lines": TURNS, "text": DONE}
    assert made == json.loads(FOX)
