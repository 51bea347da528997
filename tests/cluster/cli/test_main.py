"""The command line: every setting is a flag, and every mistake is one line that helps."""

import io
import re

import pytest

from homing.cluster.cli.main import VLLM_FLAGS, build_parser, parse, run, settings_of
from homing.cluster.config import SETTINGS
from homing.cluster.errors import SettingsError


def test_every_setting_is_a_flag_of_serve() -> None:
    """Flags are derived; one that clashed with a flag of the command itself would vanish."""
    flags = build_parser()[1]["serve"].flags()

    assert {setting.flag for setting in SETTINGS.values()} <= set(flags)
    assert len(flags) == len(set(flags))


def test_flags_become_settings() -> None:
    """Numbers, words, switches and the model's own place."""
    words = "serve ./m --replicas 3 --tensor-parallel-size 2 --no-publish-events --hash-only --policy round-robin"

    settings = settings_of(parse(words.split()))

    assert (settings.cluster.replicas, settings.replica.tensor_parallel_size) == (3, 2)
    assert (settings.events.publish_events, settings.events.hash_only) == (False, True)
    assert (settings.replica.model, settings.router.policy) == ("./m", "round-robin")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["serv"], "no command 'serv'; did you mean serve?"),
        (["serve", "--prt", "1"], "unknown argument --prt; did you mean --port?"),
        (["serve", "--prt=1"], "unknown argument --prt; did you mean --port?"),
        (["serve", "--port"], "expected one argument"),
        (["serve", "--replicas", "none"], "flag --replicas: 'none'"),
        (["serve", "a", "--model", "b"], "given twice"),
        (["stop", "--port", "1"], "unknown argument --port"),
        (["serve", "--ray-address", "a:1", "--adress", "b:1"], "unknown argument --adress; did you mean --address?"),
    ],
)
def test_a_mistake_is_named(words: list[str], expected: str) -> None:
    """With the nearest spelling where there is one."""
    with pytest.raises(SettingsError) as caught:
        settings_of(parse(words))

    assert expected in str(caught.value)


def test_flags_of_vllm_are_answered_by_ours() -> None:
    """The nearest spelling was often the opposite: --no-prefix-caching for --enable-prefix-caching."""
    said = {}
    for words in VLLM_FLAGS:
        with pytest.raises(SettingsError) as caught:
            parse(["serve", "m", words, "2"])
        said[words] = str(caught.value)

    assert said["-tp"] == "serve: unknown argument -tp; here --tensor-parallel-size"
    assert said["--max-num-seqs"].endswith("here --max-running-requests")
    assert "did you mean" not in "".join(said.values())
    named = {word for hint in VLLM_FLAGS.values() for word in re.findall(r"--[a-z-]+", hint)}
    assert named <= {*build_parser()[1]["serve"].flags()}
    assert not VLLM_FLAGS.keys() & {*build_parser()[1]["serve"].flags()}


def test_every_command_for_one_of_several_models_takes_the_same_flag() -> None:
    """Three ways to name one thing are two to look up."""
    flag = SETTINGS["served_model_name"].flag

    assert all(flag in build_parser()[1][command].flags() for command in ("scale", "explain", "update"))
    assert parse(["scale", flag, "fox", "3"]).asked_model == "fox"
    with pytest.raises(SettingsError, match="given twice: owl and --served-model-name fox"):
        run(["scale", "owl", "3", flag, "fox"], io.StringIO())


def test_no_mistake_is_told_with_the_name_of_the_program() -> None:
    """The entry point puts it in front: twice would look like a mistake of ours."""
    for words in (["explain"], ["explain", "x", "--nay"], ["--nay"], ["nay"]):
        with pytest.raises(SettingsError) as caught:
            run(words, io.StringIO())
        assert not str(caught.value).startswith("homing")


def test_a_running_ray_cluster_is_joined_by_either_flag() -> None:
    """Ray's own tools call it --address."""
    for flag in ("--address", "--ray-address"):
        assert settings_of(parse(["serve", flag, "auto"])).cluster.ray_address == "auto"


def test_no_command_shows_the_commands() -> None:
    """Somebody who types only the name wants to know what there is."""
    out = io.StringIO()

    assert run([], out) == 0
    assert all(command in out.getvalue() for command in ("serve", "status", "watch", "stop"))
