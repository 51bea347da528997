"""Settings are declared once, read from four sources, and every mistake is named."""

from pathlib import Path

import msgspec
import pytest

from homing.cluster.config import (
    PATHS,
    SECTIONS,
    SETTINGS,
    Settings,
    added_settings,
    changed_settings,
    load_settings,
    router_url,
    state_folder,
)
from homing.cluster.control.autoscale import terms_of
from homing.cluster.errors import SettingsError
from homing.cluster.preflight import prepare

from .settings_page import markdown

DOCS = Path(__file__).resolve().parents[2] / "docs" / "settings.md"


def write(folder: Path, text: str) -> Path:
    path = folder / "homing.yaml"
    path.write_text(text)
    return path


def test_no_two_sections_declare_a_setting_of_the_same_name() -> None:
    """A flag has no section prefix, so the name alone must be unique."""
    types = [section.type for section in msgspec.structs.fields(Settings) if section.name in SECTIONS]
    names = [field.name for section in types for field in msgspec.structs.fields(section)]

    assert len(names) == len(set(names))
    assert set(names) == set(SETTINGS)


def test_every_setting_says_what_it_is_for() -> None:
    """Help and documentation are generated from the description."""
    assert [name for name, setting in SETTINGS.items() if not setting.help] == []


def test_nothing_given_is_the_defaults() -> None:
    """One command must work on a fresh machine."""
    assert load_settings({}, {}) == Settings()


def test_a_flag_wins_over_a_variable_over_the_file_over_the_default(tmp_path: Path) -> None:
    """The more specific source wins."""
    path = write(tmp_path, "router:\n  port: 1\ncluster:\n  replicas: 5\nkvcache:\n  block_size: 8\n")
    environ = {"HOMING_PORT": "2", "HOMING_REPLICAS": "6", "HOME": "/"}

    settings = load_settings({"port": "3"}, environ, path)

    assert (settings.router.port, settings.cluster.replicas, settings.kvcache.block_size) == (3, 6, 8)


def test_the_file_can_be_named_by_a_variable(tmp_path: Path) -> None:
    """A container has an environment, but often no command line of its own."""
    path = write(tmp_path, "router: {port: 9}\nevents:\n")

    assert load_settings({}, {"HOMING_CONFIG": str(path)}).router.port == 9


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("1", True), ("on", True), ("false", False), ("0", False), ("off", False)]
)
def test_a_switch_reads_words_and_digits(text: str, value: bool) -> None:
    """Shells and containers write booleans in several ways."""
    assert load_settings({}, {"HOMING_PUBLISH_EVENTS": text}).events.publish_events is value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("router: {pin_ttl_s: 1}", ["'pin_ttl_s'", "it was removed: cache_control without a ttl"]),
        ("router: {prot: 1}", ["'prot'", "'router'", "did you mean port"]),
        ("router: {block_size: 1}", ["'block_size'", "belongs in section 'kvcache'"]),
        ("rooter: {port: 1}", ["'rooter'", "did you mean router"]),
        ("port: 1", ["'port'", "belongs in section 'router'"]),
        ("router: {port: eighty}", ["router.port", "'eighty'"]),
        ("router: {port: 70000}", ["router.port", "70000", "65535"]),
        ("router: {policy: expected-tfft}", ["router.policy", "did you mean expected-ttft"]),
        ("router: 3", ["section 'router'", "3"]),
        ("- router", ["top level"]),
        ("router: [", ["not valid YAML"]),
    ],
)
def test_a_mistake_in_the_file_is_named_with_the_file(tmp_path: Path, text: str, words: list[str]) -> None:
    """Silently ignoring a typo would cost hours of searching."""
    path = write(tmp_path, text)

    with pytest.raises(SettingsError) as caught:
        load_settings({}, {}, path)

    assert all(word in str(caught.value) for word in [str(path), *words]), str(caught.value)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"HOMING_STALL_TIMEOUT_S": "1"}, ["HOMING_STALL_TIMEOUT_S", "it was removed: a client that reads nothing"]),
        ({"HOMING_PROT": "1"}, ["HOMING_PROT", "did you mean HOMING_PORT"]),
        ({"HOMING_PORT": "x"}, ["HOMING_PORT", "'x'", "port"]),
    ],
)
def test_a_mistake_in_the_environment_is_named_with_the_variable(environ: dict[str, str], words: list[str]) -> None:
    """The `HOMING_` prefix is ours alone, so an unknown variable is a mistake."""
    with pytest.raises(SettingsError) as caught:
        load_settings({}, environ)

    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_malformed_flag_is_named() -> None:
    """The error must repeat the flag."""
    with pytest.raises(SettingsError, match=r"--max-waiting-requests: '0' is not valid for max_waiting_requests"):
        load_settings({"max_waiting_requests": "0"}, {})


def test_no_replicas_are_not_as_many_as_fit(tmp_path: Path) -> None:
    """`homing scale 0` ends all, so `--replicas 0` must not start two."""
    for given in ({"flags": {"replicas": "0"}}, {"environ": {"HOMING_REPLICAS": "0"}}):
        with pytest.raises(SettingsError, match=r"0 is not valid for replicas: give at least 1, or leave it out"):
            load_settings(given.get("flags", {}), given.get("environ", {}))
    with pytest.raises(SettingsError, match="give at least 1"):
        load_settings({}, {}, write(tmp_path, "cluster: {replicas: 0}"))


def test_a_misspelt_policy_is_corrected_without_a_list_of_all() -> None:
    """Most of them only compare other routers."""
    with pytest.raises(SettingsError) as caught:
        load_settings({"policy": "expected-tfft"}, {})

    assert str(caught.value).endswith("homing serve --help` lists; did you mean expected-ttft?")
    with pytest.raises(SettingsError, match="expected one of auto, float32"):
        load_settings({"dtype": "float"}, {})


def test_a_flag_without_its_file_takes_no_other_flag_for_one() -> None:
    """`--access-log -` needs a parser that lets values begin with a hyphen."""
    assert load_settings({"access_log": "-"}, {}).router.access_log == "-"
    with pytest.raises(SettingsError, match="flag --access-log: give a file, not --port"):
        load_settings({"access_log": "--port"}, {})


def test_no_number_is_without_a_lower_bound() -> None:
    """A negative size would otherwise be detected only where it is used, in the middle of a start."""
    numbers = [setting for setting in SETTINGS.values() if setting.bare_type in (int, float)]

    assert [setting.name for setting in numbers if setting.meta.ge is None and setting.meta.gt is None] == []


@pytest.mark.parametrize("text", ["inf", "nan"])
def test_a_number_is_finite(text: str) -> None:
    """Timers reject infinite values, and an endless wait is never intended."""
    with pytest.raises(SettingsError, match=r"--stop-timeout-s.*stop_timeout_s"):
        load_settings({"stop_timeout_s": text}, {})


def test_files_are_named_by_their_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks and routers are other processes, possibly with another working directory."""
    monkeypatch.chdir(tmp_path)
    given = dict.fromkeys(PATHS, "keys/a")

    settings = load_settings(given, {})

    assert {getattr(getattr(settings, SETTINGS[name].section), name) for name in PATHS} == {str(tmp_path / "keys/a")}
    assert load_settings({"access_log": "-", "chat_template": ""}, {}) == Settings()


def test_the_file_that_a_cluster_was_started_with_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file may name others in the folder of the command; models are added by editing it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.jinja").touch()
    text = "router: {chat_template: own.jinja, response_store: store.db}\nreplica: {tokenizer: words}"
    running = prepare(load_settings({}, {}, write(tmp_path, text)))

    assert changed_settings({"demo": running}, {}, tmp_path / "homing.yaml") == {"demo": running}


def test_the_home_folder_of_a_user_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    """A slip such as ~models/fox would otherwise end the command with a traceback wherever the path is used."""
    with pytest.raises(SettingsError, match=r"--model: '~no-such-user/fox' is not valid for model"):
        load_settings({"model": "~no-such-user/fox"}, {})
    assert load_settings({"model": "~/fox"}, {}).replica.model == "~/fox"


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    """A missing file that was asked for must not mean defaults."""
    with pytest.raises(SettingsError, match=r"nowhere\.yaml: No such file"):
        load_settings({}, {}, tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    "text",
    [
        "cluster: {replicas: 3}\ncluster: {routers: 2}",
        "models:\n- {name: a, model: demo, dtype: float32, dtype: bfloat16}",
    ],
)
def test_a_key_occurs_once(tmp_path: Path, text: str) -> None:
    """YAML parsers keep the last value; settings that an operator wrote would be lost without a word."""
    with pytest.raises(SettingsError, match=r"homing\.yaml is not valid YAML: '(cluster|dtype)' occurs twice"):
        load_settings({}, {}, write(tmp_path, text))


def test_words_that_yaml_1_1_takes_for_numbers_or_dates_are_text(tmp_path: Path) -> None:
    """It reads 1:8 as 68 (a number to the base of 60), and a date that does not exist as an error."""
    settings = load_settings({}, {}, write(tmp_path, "cluster: {autoscale: 1:8, name: 2026-13-41, replicas: 0x2}"))

    assert (settings.cluster.autoscale, settings.cluster.name, settings.cluster.replicas) == ("1:8", "2026-13-41", 2)


@pytest.mark.parametrize("text", ["cluster: {replicas: !!int three}", "[" * 100_000])
def test_a_file_that_yaml_cannot_construct_is_an_error(tmp_path: Path, text: str) -> None:
    """The parser raises errors of other kinds for these."""
    with pytest.raises(SettingsError, match="not valid YAML"):
        load_settings({}, {}, write(tmp_path, text))


@pytest.mark.parametrize(
    ("flags", "url"),
    [
        ({"host": "::1"}, "http://[::1]:8001"),
        ({"host": "::"}, "http://127.0.0.1:8001"),
        ({"host": "0.0.0.0"}, "http://127.0.0.1:8001"),
        ({"host": "10.0.0.1", "tls_cert_file": "cert.pem"}, "https://10.0.0.1:8001"),
    ],
)
def test_a_url_can_be_used_as_it_is_printed(flags: dict[str, str], url: str) -> None:
    """An IPv6 address needs brackets, and the address of all interfaces is none to connect to."""
    assert router_url(load_settings(flags, {}).router, 8001) == url


def test_clusters_are_noted_in_the_users_state_folder_unless_set() -> None:
    """The XDG default location, unless a setting overrides it."""
    default, moved = Settings(), load_settings({"state_dir": "/srv/homing"}, {})

    assert state_folder(default, {"XDG_STATE_HOME": "/s"}) == Path("/s/homing")
    assert state_folder(default, {}).parts[-3:] == (".local", "state", "homing")
    assert state_folder(moved, {"XDG_STATE_HOME": "/s"}) == Path("/srv/homing")


def test_the_settings_page_is_the_generated_one() -> None:
    """Handwritten docs go stale; write with `python -m tests.cluster.settings_page > docs/settings.md`."""
    assert DOCS.read_text() == markdown()


def test_the_settings_page_has_a_section_for_every_room() -> None:
    """Settings in a file are documented under the file's own section names."""
    assert all(f"\n## {section}\n" in markdown() for section in SECTIONS)


MODELS = """
models:
  - name: small
    model: org/small
    replicas: 3
  - name: large
    model: org/large
    tensor_parallel_size: 2
    block_size: 32
    autoscale: "0:4"
kvcache: {num_kv_blocks: 9}
cluster: {replicas: 1, gpus_per_rank: 0.5}
"""


def test_each_listed_model_has_its_own_settings_over_those_of_all(tmp_path: Path) -> None:
    """Settings missing in an entry come from sections, variables and flags, as for a single model."""
    settings = load_settings({"max_model_len": "99"}, {"HOMING_DTYPE": "float32"}, write(tmp_path, MODELS))

    small, large = settings.each_model
    assert [each.served_name for each in (small, large)] == ["small", "large"]
    assert [each.replica.model for each in (small, large)] == ["org/small", "org/large"]
    assert [each.cluster.replicas for each in (small, large)] == [3, 1]
    assert [each.kvcache.block_size for each in (small, large)] == [16, 32]
    assert (large.cluster.autoscale, large.ranks, small.ranks) == ("0:4", 2, 3)
    for each in (small, large):
        assert (each.replica.max_model_len, each.replica.dtype) == (99, "float32")
        assert (each.kvcache.num_kv_blocks, each.cluster.gpus_per_rank) == (9, 0.5)


def test_one_model_needs_no_list() -> None:
    """Without a list, the settings describe the one model."""
    settings = load_settings({}, {})

    assert settings.models == ()
    assert settings.each_model == (settings,)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("models: {}", ["models must be a list"]),
        ("models: []", ["models must be a list", "at least one"]),
        ("models: [demo]", ["models[0] must map keys to values", "'demo'"]),
        ("models: [{model: a}]", ["models[0].name", "the name that requests use"]),
        ("models: [{name: a}]", ["models[0].model", "a Hugging Face name or a local folder"]),
        ("models: [{name: 3, model: a}]", ["models[0].name", "3"]),
        ("models: [{name: a, model: b}, {name: a, model: c}]", ["models[1].name", "models[0] has the name 'a'"]),
        ("models: [{name: a, model: b, replica: 2}]", ["models[0].replica:", "put its settings next to name"]),
        (
            "models: [{name: a, model: b, stable_after_s: 2}]",
            ["models[0].stable_after_s", "it was removed: what served"],
        ),
        ("models: [{name: a, model: b, replcas: 2}]", ["models[0].replcas: no such setting", "did you mean replicas"]),
        ("models: [{name: a, model: b, port: 2}]", ["models[0].port: all models share this setting", "'router'"]),
        ("models: [{name: a, model: b, replicas: x}]", ["models[0].replicas", "'x' is not valid for replicas"]),
        ("models: [{name: a, model: b}]\nreplica: {model: c}", ["replica.model", "each model has its own model"]),
        ("modles: [{name: a, model: b}]", ["no section 'modles'", "did you mean models"]),
    ],
)
def test_a_mistake_in_the_list_is_named_by_its_place(tmp_path: Path, text: str, words: list[str]) -> None:
    """In a list of ten models, `replicas` alone would not tell which entry is wrong."""
    with pytest.raises(SettingsError) as caught:
        load_settings({}, {}, write(tmp_path, text))

    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("name", ["model", "served_model_name"])
def test_a_model_beside_the_list_is_refused(tmp_path: Path, name: str) -> None:
    """`homing serve MODEL --config two.yaml` would otherwise serve something else than MODEL."""
    path = write(tmp_path, MODELS)

    with pytest.raises(SettingsError, match=f"flag --{name.replace('_', '-')}: each model has its own {name}"):
        load_settings({name: "x"}, {}, path)
    with pytest.raises(SettingsError, match=f"variable HOMING_{name.upper()}: each model has its own {name}"):
        load_settings({}, {f"HOMING_{name.upper()}": "x"}, path)


def test_the_example_of_several_models_is_one() -> None:
    """The README starts this example."""
    settings = load_settings({}, {}, DOCS.parents[1] / "deploy" / "models.yaml")

    assert [(each.served_name, each.ranks) for each in settings.models] == [("qwen3-0.6b", 1), ("qwen3-8b", 4)]
    assert [terms_of(each.cluster) is not None for each in settings.models] == [True, False]


def running(tmp_path: Path) -> dict[str, Settings]:
    return {each.served_name: each for each in load_settings({}, {}, write(tmp_path, MODELS)).models}


def test_an_update_changes_the_model_that_is_named(tmp_path: Path) -> None:
    """Flags apply to one model; with several, the command must name it."""
    before = running(tmp_path)

    changed = changed_settings(before, {"served_model_name": "large", "model": "org/larger"}, None)

    assert list(changed) == ["large"]
    assert changed["large"].replica.model == "org/larger"
    assert changed["large"].kvcache == before["large"].kvcache
    with pytest.raises(SettingsError, match=r"choose one with --served-model-name \(small, large\)"):
        changed_settings(before, {"block_size": "8"}, None)
    with pytest.raises(SettingsError, match=r"model 'x' is not served here \(served: small, large\)"):
        changed_settings(before, {"served_model_name": "x"}, None)


def test_an_update_from_a_file_changes_every_model_that_it_lists(tmp_path: Path) -> None:
    """The edited file of the running cluster may be passed again: unchanged models are left alone."""
    before = running(tmp_path)
    path = write(tmp_path, MODELS.replace("org/small", "org/smaller"))

    changed = changed_settings(before, {}, path)

    assert {name: each.replica.model for name, each in changed.items()} == {
        "small": "org/smaller",
        "large": "org/large",
    }
    assert changed["large"] == before["large"]


def test_a_model_that_a_file_adds_takes_what_is_common_from_the_cluster(tmp_path: Path) -> None:
    """Settings shared by all models come from the cluster, others from the entry and the file's sections."""
    before = {each.served_name: each for each in load_settings({"port": "81"}, {}, write(tmp_path, MODELS)).models}
    more = MODELS.replace("kvcache:", "  - name: third\n    model: org/third\n    replicas: 2\nkvcache:")

    added = added_settings(before, write(tmp_path, more))

    assert list(added) == ["third"]
    third = added["third"]
    assert third.router == msgspec.structs.replace(before["small"].router, served_model_name="third")
    assert (third.replica.model, third.cluster.replicas, third.kvcache.num_kv_blocks) == ("org/third", 2, 9)
    assert changed_settings(before, {}, write(tmp_path, more)) == before
    assert added_settings(before, write(tmp_path, MODELS)) == {}
    assert added_settings(before, None) == {}
    with pytest.raises(SettingsError, match=r"router.port: port cannot change while the cluster runs"):
        added_settings(before, write(tmp_path, more + "router: {port: 82}\n"))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("replicas: 3", "replicas: 4", "models[0].replicas: replicas cannot change while the cluster runs; use homing"),
        ("name: large", "name: huge", "models: large not listed; to stop serving them, add --remove large"),
        ('autoscale: "0:4"', 'autoscale: "0:5"', "models[1].autoscale: autoscale cannot change"),
    ],
)
def test_what_no_update_can_change_is_refused(tmp_path: Path, old: str, new: str, words: str) -> None:
    """The error says what to do instead."""
    before = running(tmp_path)

    with pytest.raises(SettingsError) as caught:
        changed_settings(before, {}, write(tmp_path, MODELS.replace(old, new)))

    assert words in str(caught.value)
