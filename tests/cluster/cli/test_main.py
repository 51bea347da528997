"""The command line: every setting is a flag, and every mistake is reported in one helpful line."""

import io
import re
import subprocess
import sys

import pytest

from homing.cluster.cli.main import NAMES, VLLM_FLAGS, app, main, parse, run
from homing.cluster.config import SETTINGS
from homing.cluster.errors import SettingsError


def flags(command: str) -> list[str]:
    arguments = app[command].assemble_argument_collection()
    return [name for argument in arguments if argument.parse for name in argument.names if name.startswith("-")]


@pytest.mark.parametrize("command", NAMES)
def test_no_flag_of_a_command_hides_another(command: str) -> None:
    """Most flags are derived from settings; one that clashed with a command's own flag would vanish."""
    found = flags(command)

    assert len(found) == len(set(found))


def test_every_setting_is_a_flag_of_serve() -> None:
    """Any setting of a file can be tried on the command line."""
    assert {flag for setting in SETTINGS.values() for flag in setting.flags} <= {*flags("serve")}


def test_flags_become_settings() -> None:
    """Covers numbers, words, switches and the model argument."""
    words = "serve ./m --replicas 3 --tensor-parallel-size 2 --no-publish-events --hash-only --policy round-robin"

    settings = parse(words.split()).settings

    assert (settings.cluster.replicas, settings.replica.tensor_parallel_size) == (3, 2)
    assert (settings.events.publish_events, settings.events.hash_only) == (False, True)
    assert (settings.replica.model, settings.router.policy) == ("./m", "round-robin")


def test_the_last_of_several_values_counts() -> None:
    """Scripts append the user's flags to their own."""
    settings = parse(["serve", "--port", "1", "--hash-only", "--port", "2", "--no-hash-only"]).settings

    assert (settings.router.port, settings.events.hash_only) == (2, False)


@pytest.mark.parametrize(
    "words", [["scale"], ["scale", "fox", "some"], ["scale", "1", "2", "3"], ["scale", "²"], ["scale", "5000"]]
)
def test_scale_takes_a_number_and_before_it_a_model(words: list[str]) -> None:
    """With one model, the name is optional; two words are told apart by position."""
    with pytest.raises(SettingsError, match=r"scale: .*number of replicas"):
        run(words, io.StringIO())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["serv"], "no command 'serv'; did you mean serve?"),
        (["serve", "--prt", "1"], "unknown argument --prt; did you mean --port?"),
        (["serve", "--pin-ttl-s", "1"], "unknown argument --pin-ttl-s; it was removed: cache_control without a ttl"),
        (["serve", "--prt=1"], "unknown argument --prt; did you mean --port?"),
        (["serve", "--port"], "--port requires an argument (see: homing serve --help)"),
        (["serve", "--replicas", "none"], "flag --replicas: 'none'"),
        (["serve", "a", "--model", "b"], "given twice"),
        (["serve", "a", "b"], "serve: unknown argument b (see: homing serve --help)"),
        (["stop", "--port", "1"], "unknown argument --port"),
        (["logs", "--lines", "few"], 'unable to convert "few" into int'),
        (["drain"], "REPLICA requires an argument"),
        (["--vesion"], "unknown argument --vesion; did you mean --version?"),
        (["serve", "--ray-address", "a:1", "--adress", "b:1"], "unknown argument --adress; did you mean --address?"),
    ],
)
def test_a_mistake_is_named(words: list[str], expected: str) -> None:
    """The message suggests the nearest spelling if there is one."""
    with pytest.raises(SettingsError) as caught:
        assert parse(words).settings

    assert expected in str(caught.value)


def test_flags_of_vllm_are_answered_by_ours() -> None:
    """The nearest spelling was often the opposite: --no-prefix-caching for --enable-prefix-caching."""
    said = {}
    for words in VLLM_FLAGS:
        with pytest.raises(SettingsError) as caught:
            parse(["serve", "m", words, "2"])
        said[words] = str(caught.value)

    assert said["-tp"] == "serve: unknown argument -tp; use --tensor-parallel-size"
    assert said["--max-num-seqs"].endswith("use --max-running-requests")
    assert "did you mean" not in "".join(said.values())
    named = {word for hint in VLLM_FLAGS.values() for word in re.findall(r"--[a-z-]+", hint)}
    assert named <= {*flags("serve")}
    assert not VLLM_FLAGS.keys() & {*flags("serve")}


def test_every_command_for_one_of_several_models_takes_the_same_flag() -> None:
    """Users should have to learn only one way to name a model."""
    flag = SETTINGS["served_model_name"].flag

    assert all(flag in flags(command) for command in ("scale", "explain", "update"))
    assert parse(["scale", flag, "fox", "3"]).arguments["asked_model"] == "fox"
    with pytest.raises(SettingsError, match="given twice: owl and --served-model-name fox"):
        run(["scale", "owl", "3", flag, "fox"], io.StringIO())


def test_no_mistake_is_told_with_the_name_of_the_program() -> None:
    """The entry point adds the name, and it must not appear twice."""
    for words in (["explain"], ["explain", "x", "--nay"], ["--nay"], ["nay"]):
        with pytest.raises(SettingsError) as caught:
            run(words, io.StringIO())
        assert not str(caught.value).startswith("homing")


def test_a_running_ray_cluster_is_joined_by_either_flag() -> None:
    """Ray's own tools call it --address."""
    for flag in ("--address", "--ray-address"):
        assert parse(["serve", flag, "auto"]).settings.cluster.ray_address == "auto"


def test_no_command_shows_the_commands() -> None:
    """A user who types only the program's name wants a list of commands by task; scripts need plain lines."""
    out = io.StringIO()

    assert run([], out) == 0
    page = out.getvalue()
    assert all(f"  {command}: " in page for command in NAMES)
    assert page.index("Start and end:") < page.index("Change a running cluster:") < page.index("Observe:")
    assert "\x1b" not in page


@pytest.mark.parametrize("command", NAMES)
def test_every_command_explains_itself(command: str) -> None:
    """The help covers all of the command's flags."""
    out = io.StringIO()

    assert run([command, "--help"], out) == 0
    assert {flag for flag in flags(command) if flag.startswith("--")} - {"--background"} <= {
        *re.findall(r"--[a-z-]+", out.getvalue())
    }


def test_help_loads_nothing_heavy() -> None:
    """Help is the first thing that a new user types, so it must appear at once."""
    heavy = (
        "{'ray', 'torch', 'transformers', 'numba', 'prometheus_client', 'psutil', 'asyncio', 'zmq', 'yaml', 'msgspec'}"
    )
    code = "import sys, io; from homing.cluster.cli.main import run; run(['--help'], io.StringIO()); "
    code += f"print({heavy} & {{*sys.modules}})"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)

    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands_and_flags(shell: str) -> None:
    """`homing --install-completion` writes this script."""
    script = app.generate_completion(shell=shell)

    assert all(word in script for word in (*NAMES, "tensor-parallel-size"))


def test_values_of_settings_are_completed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The completion script runs this command to get the values."""
    monkeypatch.setattr(sys, "argv", ["homing", "__complete", "serve", "--policy", "round"])

    assert main() == 0
    assert "round-robin" in capsys.readouterr().out


def test_the_access_log_may_be_a_hyphen() -> None:
    """The settings page says so; the parser took it for a flag."""
    assert parse(["serve", "m", "--access-log", "-", "--port", "0"]).settings.router.access_log == "-"


def test_arguments_for_an_engine_may_begin_with_a_hyphen() -> None:
    """They nearly always do, and users would not guess that an equals sign is needed."""
    words = ["serve", "m", "--engine", "vllm", "--engine-args", "--enforce-eager --seed 3", "--port", "0"]

    settings = parse(words).settings

    assert (settings.replica.engine_args, settings.router.port) == ("--enforce-eager --seed 3", 0)
