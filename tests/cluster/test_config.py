"""Settings: declared once, taken from four places, and every mistake named."""

from pathlib import Path

import msgspec
import pytest

from homing.cluster.config import ROOMS, SETTINGS, Settings, load_settings, markdown, state_folder
from homing.cluster.errors import SettingsError

DOCS = Path(__file__).resolve().parents[2] / "docs" / "settings.md"


def write(folder: Path, text: str) -> Path:
    path = folder / "homing.yaml"
    path.write_text(text)
    return path


def test_no_two_rooms_declare_a_setting_of_the_same_name() -> None:
    """A flag has no room in front, so a name must be enough."""
    names = [field.name for room in msgspec.structs.fields(Settings) for field in msgspec.structs.fields(room.type)]

    assert len(names) == len(set(names))
    assert set(names) == set(SETTINGS)


def test_every_setting_says_what_it_is_for() -> None:
    """Help and table come from the description; without one they would show a bare name."""
    assert [name for name, setting in SETTINGS.items() if not setting.description] == []


def test_nothing_given_is_the_defaults() -> None:
    """One command must work on a fresh machine."""
    assert load_settings({}, {}) == Settings()


def test_a_flag_wins_over_a_variable_over_the_file_over_the_default(tmp_path: Path) -> None:
    """The nearer to the command that is typed, the stronger."""
    path = write(tmp_path, "router:\n  port: 1\ncluster:\n  replicas: 5\nkvcache:\n  block_size: 8\n")
    environ = {"HOMING_PORT": "2", "HOMING_REPLICAS": "6", "HOME": "/"}

    settings = load_settings({"port": "3"}, environ, path)

    assert (settings.router.port, settings.cluster.replicas, settings.kvcache.block_size) == (3, 6, 8)


def test_the_file_can_be_named_by_a_variable(tmp_path: Path) -> None:
    """A container has an environment, but often no command line of its own."""
    path = write(tmp_path, "router: {port: 9}\nevents:\n")

    assert load_settings({}, {"HOMING_CONFIG": str(path)}).router.port == 9


@pytest.mark.parametrize(("text", "value"), [("true", True), ("1", True), ("false", False), ("0", False)])
def test_a_switch_reads_words_and_digits(text: str, value: bool) -> None:
    """Shells and containers write truth in more than one way."""
    assert load_settings({}, {"HOMING_PUBLISH_EVENTS": text}).events.publish_events is value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("router: {prot: 1}", ["'prot'", "'router'", "did you mean port"]),
        ("router: {block_size: 1}", ["'block_size'", "belongs into section 'kvcache'"]),
        ("rooter: {port: 1}", ["'rooter'", "did you mean router"]),
        ("port: 1", ["'port'", "belongs into section 'router'"]),
        ("router: {port: eighty}", ["router.port", "'eighty'"]),
        ("router: {port: 70000}", ["router.port", "70000", "65535"]),
        ("router: {policy: expected-tfft}", ["router.policy", "did you mean expected-ttft"]),
        ("router: 3", ["section 'router'", "3"]),
        ("- router", ["top level"]),
        ("router: [", ["no YAML"]),
    ],
)
def test_a_mistake_in_the_file_is_named_with_the_file(tmp_path: Path, text: str, words: list[str]) -> None:
    """A typo that is silently ignored costs an afternoon."""
    path = write(tmp_path, text)

    with pytest.raises(SettingsError) as caught:
        load_settings({}, {}, path)

    assert all(word in str(caught.value) for word in [str(path), *words]), str(caught.value)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"HOMING_PROT": "1"}, ["HOMING_PROT", "did you mean HOMING_PORT"]),
        ({"HOMING_PORT": "x"}, ["HOMING_PORT", "'x'", "port"]),
    ],
)
def test_a_mistake_in_the_environment_is_named_with_the_variable(environ: dict[str, str], words: list[str]) -> None:
    """The same for variables: the prefix is ours alone."""
    with pytest.raises(SettingsError) as caught:
        load_settings({}, environ)

    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_malformed_flag_is_named() -> None:
    """And for flags."""
    with pytest.raises(SettingsError, match=r"--max-waiting-requests: '0' does not do for max_waiting_requests"):
        load_settings({"max_waiting_requests": "0"}, {})


def test_no_number_is_without_a_lower_bound() -> None:
    """A negative size would be found by whoever uses it, in the middle of a start."""
    numbers = [setting for setting in SETTINGS.values() if setting.bare_type in (int, float)]

    assert [setting.name for setting in numbers if setting.meta.ge is None and setting.meta.gt is None] == []


@pytest.mark.parametrize("text", ["inf", "nan"])
def test_a_number_is_finite(text: str) -> None:
    """Nobody waits for ever on purpose, and timers refuse it."""
    with pytest.raises(SettingsError, match=r"--stop-timeout-s.*stop_timeout_s"):
        load_settings({"stop_timeout_s": text}, {})


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    """A file that was asked for and is not there must not mean defaults."""
    with pytest.raises(SettingsError, match=r"nowhere\.yaml: No such file"):
        load_settings({}, {}, tmp_path / "nowhere.yaml")


def test_clusters_are_noted_in_the_users_state_folder_unless_set() -> None:
    """XDG's place, and a setting for everybody else."""
    default, moved = Settings(), load_settings({"state_dir": "/srv/homing"}, {})

    assert state_folder(default, {"XDG_STATE_HOME": "/s"}) == Path("/s/homing")
    assert state_folder(default, {}).parts[-3:] == (".local", "state", "homing")
    assert state_folder(moved, {"XDG_STATE_HOME": "/s"}) == Path("/srv/homing")


def test_the_settings_page_is_the_generated_one() -> None:
    """Docs that are written by hand go stale: `python -m homing.cluster.config > docs/settings.md`."""
    assert DOCS.read_text() == markdown()


def test_the_settings_page_has_a_section_for_every_room() -> None:
    """What can be set in a file is documented under the file's own section names."""
    assert all(f"\n## {room}\n" in markdown() for room in ROOMS)
