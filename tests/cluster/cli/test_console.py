"""The output of `homing serve`: every command it shows can be copied and run."""

import io
import json
import re
import shlex
from pathlib import Path

import msgspec
import pytest

from homing.cluster.cli.console import Console, command_name, model_label, request_line
from homing.cluster.cli.main import parse
from homing.cluster.config import Settings, load_settings
from homing.cluster.control.control_messages import ClusterStatus

STATUS = ClusterStatus(replicas=(), url="http://127.0.0.1:8000", router_urls=(), router_error=None, notices=())


def banner(settings: Settings, program: str = "homing") -> str:
    out = io.StringIO()
    Console(out, program=program).banner(STATUS, settings, detached=True)
    return out.getvalue()


def make_script(folder: Path) -> Path:
    """A folder as pip fills it; returns the path of its interpreter."""
    folder.mkdir(parents=True)
    (folder / "homing").touch()
    return folder / "python"


def test_a_command_is_called_as_this_shell_would_find_it(tmp_path: Path) -> None:
    """`make serve` installs into .venv, which is usually not on PATH, while another homing may be."""
    python = make_script(tmp_path / "project" / ".venv" / "bin")
    other = make_script(tmp_path / "usr" / "bin").with_name("homing")
    here = tmp_path / "project"

    assert command_name(python, None, here) == ".venv/bin/homing"
    assert command_name(python, str(python.with_name("homing")), here) == "homing"
    assert command_name(python, str(other), here) == ".venv/bin/homing"
    assert command_name(python, None, tmp_path / "usr") == str(python.with_name("homing"))


def test_what_the_shell_would_take_apart_is_quoted(tmp_path: Path) -> None:
    """Home folders may contain spaces."""
    python = make_script(tmp_path / "my project" / "bin")

    assert shlex.split(command_name(python, None, tmp_path)) == ["my project/bin/homing"]
    assert shlex.split(command_name(tmp_path / "no script" / "python", None, tmp_path))[1:] == [
        "-m",
        "homing.cluster.cli.main",
    ]


def test_every_command_of_the_banner_finds_the_cluster() -> None:
    """The commands must work in another terminal, where no variable is set."""
    settings = load_settings({"name": "blue", "state_dir": "/srv/state folder"}, {})

    commands = [shlex.split(line)[1:] for line in re.findall(r"^  \w+ +(homing .*)$", banner(settings), re.MULTILINE)]

    assert [words[0] for words in commands] == ["status", "explain", "watch", "stop"]
    for words in commands:
        cluster = parse(words).settings.cluster
        assert (cluster.name, cluster.state_dir) == ("blue", "/srv/state folder")


def test_the_example_works_for_a_model_without_a_chat_template() -> None:
    """A new user's first request must not fail with 400."""
    out = io.StringIO()

    Console(out).banner(STATUS, Settings(), detached=False, chats=False)

    assert re.search(r"curl http://127.0.0.1:8000/v1/completions .*\"prompt\": ", out.getvalue())
    assert 'homing explain --raw "Once upon a time"' in out.getvalue()


def test_one_replica_is_not_called_replicas() -> None:
    """A model served under another name is shown with both."""
    assert "homing is ready: fox on 1 replica\n" in banner(
        load_settings({"replicas": "1", "served_model_name": "fox"}, {})
    )
    assert (model_label("demo", "demo"), model_label("fox", "./ox")) == ("demo", "fox (./ox)")


def test_several_models_are_all_named_and_the_commands_choose_one() -> None:
    """The shown commands are copied; without a model's name they would be refused."""
    fox, owl = (load_settings({"served_model_name": name, "replicas": "3"}, {}) for name in ("fox", "forest/owl"))
    settings = msgspec.structs.replace(Settings(), models=(fox, owl))
    out = io.StringIO()

    Console(out).print_opening(settings)
    Console(out).banner(STATUS, settings, detached=False)

    page = out.getvalue()
    assert "· 2 models\n  fox · model demo · 3 replicas\n  forest/owl · model demo · 3 replicas\n" in page
    assert "homing is ready: fox on 3 replicas, forest/owl on 3 replicas" in page
    assert '"model": "fox"' in page
    assert "homing explain --served-model-name fox" in page


def test_a_request_is_one_line_with_what_matters() -> None:
    """Users who start a server want to see its requests, but not its monitoring."""
    line = (
        "2026-11-22 10:00:01.000 INFO    ts=1 request=abc method=POST path=/v1/completions status=200 "
        "duration_ms=1234.5 ttft_ms=23.4 tenant=- replica=r1 prompt=812 predicted=800 cached=640 output=96"
    )
    refused = "ts=1 request=abc method=POST path=/v1/completions status=400 duration_ms=0.6"
    as_json = json.dumps({"time": "2026-11-22 10:00:01.000", "level": "INFO", "message": refused})

    assert request_line(line) == (
        "/v1/completions 200 · r1 · 1.23 s · 812 tokens in, 640 of them cached, 96 out · first after 23.4 ms"
    )
    assert request_line(refused) == request_line(as_json) == "/v1/completions 400 · 0.00 s"


class Closed(io.StringIO):
    """A pipe whose reader has closed it."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_reader_that_goes_away_ends_all_but_taking_down() -> None:
    """A closed pipe ends `homing serve | head`, but the shutdown must still clean up."""
    console = Console(Closed())

    with pytest.raises(BrokenPipeError):
        console.line("ready")
    console.print_shutdown("stopping")


def test_the_usual_cluster_needs_no_flags() -> None:
    """Short commands are easier to read."""
    assert re.search(r"^  status   homing status$", banner(Settings()), re.MULTILINE)
