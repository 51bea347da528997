"""All settings in one tree, and the four places they come from: default, file, environment, flag (the last wins).

A setting is declared once, as a field of its room's struct; YAML key, flag, variable and the table in docs/settings.md
follow from the field's name, type and description. This is the only module that reads the environment. It knows
nothing of what the settings do.
"""

import difflib
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
import yaml
from msgspec import Meta

from ..events.config import EventsSettings
from ..kvcache.config import KvCacheSettings
from ..replica.config import ReplicaSettings
from ..router.config import RouterSettings
from .errors import SettingsError

VARIABLE_PREFIX = "HOMING_"


class ClusterSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many replicas there are, where they run and how they are watched."""

    name: Annotated[
        str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$", description="name of the cluster on this machine")
    ] = "default"
    replicas: Annotated[int, Meta(ge=1, le=4096, description="number of replicas")] = 2
    autoscale: Annotated[
        str,
        Meta(
            pattern=r"^(\d+:\d+)?$",
            description="MIN:MAX replicas, between which their number follows what waits; MIN may be 0: the first "
            "request then waits for a start; empty: it stays as it is",
        ),
    ] = ""
    ttft_target_s: Annotated[
        float, Meta(gt=0, description="autoscaling adds replicas when a prompt would wait longer for its first token")
    ] = 1.0
    scale_down_after_s: Annotated[
        float, Meta(gt=0, description="autoscaling takes a replica away that was not needed for so long")
    ] = 120.0
    routers: Annotated[
        int, Meta(ge=1, le=64, description="router processes on one port, each of which hears all replicas")
    ] = 1
    ray_address: Annotated[
        str,
        Meta(
            description="Ray cluster to join, such as auto or host:6379; empty: a local one of our own",
            extra={"alias": "--address"},
        ),
    ] = ""
    cpus_per_rank: Annotated[
        float,
        Meta(
            ge=0, description="logical CPUs of a joined cluster that Ray reserves for a rank; steers scheduling alone"
        ),
    ] = 1.0
    gpus_per_rank: Annotated[float, Meta(ge=0, description="GPUs that Ray reserves for a rank")] = 0.0
    start_timeout_s: Annotated[
        float, Meta(gt=0, description="a replica that is not ready after so long counts as failed")
    ] = 600.0
    health_interval_s: Annotated[
        float, Meta(gt=0, description="seconds between two questions whether a rank lives")
    ] = 2.0
    health_timeout_s: Annotated[
        float, Meta(gt=0, description="a rank that does not answer for so long counts as dead")
    ] = 30.0
    restart_backoff_s: Annotated[
        float, Meta(gt=0, description="pause before the second rebuild of a replica; doubles with each failure")
    ] = 1.0
    restart_backoff_limit_s: Annotated[float, Meta(gt=0, description="longest pause between two rebuilds")] = 30.0
    stable_after_s: Annotated[
        float, Meta(gt=0, description="a replica that served for so long starts over with the shortest pause")
    ] = 60.0
    drain_timeout_s: Annotated[
        float, Meta(gt=0, description="requests that a draining replica has after so long go on elsewhere")
    ] = 60.0
    surge: Annotated[
        bool,
        Meta(description="an update starts a replica before it drains one; without, it needs no room for one more"),
    ] = True
    warm_up_s: Annotated[
        float,
        Meta(
            gt=0,
            description="a replica that comes to others takes requests after so long at the latest, however warm",
        ),
    ] = 10.0
    stop_timeout_s: Annotated[float, Meta(gt=0, description="time to take everything down before it is killed")] = 20.0
    state_dir: Annotated[
        str,
        Meta(description="where running clusters are noted; empty: $XDG_STATE_HOME/homing or ~/.local/state/homing"),
    ] = ""
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="debug also shows what the actors write")
    ] = "info"


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that can be set, by room.

    Where several models are served, `models` has whole settings for each: its own, and what all share.
    """

    kvcache: KvCacheSettings = KvCacheSettings()
    events: EventsSettings = EventsSettings()
    replica: ReplicaSettings = ReplicaSettings()
    router: RouterSettings = RouterSettings()
    cluster: ClusterSettings = ClusterSettings()
    models: tuple["Settings", ...] = ()

    @property
    def each_model(self) -> tuple["Settings", ...]:
        """The settings of each model, of which there is at least one."""
        return self.models or (self,)

    @property
    def ranks(self) -> int:
        """Processes of this model's replicas, as many as there are at first."""
        return self.cluster.replicas * self.replica.tensor_parallel_size

    @property
    def served_name(self) -> str:
        """The name that requests use for this model."""
        return self.router.served_model_name


@dataclass(slots=True, frozen=True)
class Setting:
    """One field of one room's struct, and its names."""

    room: str
    name: str
    type: Any
    default: Any
    meta: Meta

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def flags(self) -> tuple[str, ...]:
        """All spellings of its flag; the first is the one that messages use."""
        alias = (self.meta.extra or {}).get("alias")
        return (self.flag, alias) if alias else (self.flag,)

    @property
    def variable(self) -> str:
        return VARIABLE_PREFIX + self.name.upper()

    @property
    def bare_type(self) -> Any:
        """The type without its constraints."""
        return get_args(self.type)[0]

    @property
    def choices(self) -> tuple[str, ...] | None:
        """The words that are allowed, where there are only some."""
        return get_args(self.bare_type) if get_origin(self.bare_type) is Literal else None

    @property
    def description(self) -> str:
        return self.meta.description or ""

    @property
    def repeatable(self) -> bool:
        """Whether its flag may be given again, to add to a list separated by commas."""
        return bool((self.meta.extra or {}).get("repeatable"))


@dataclass(slots=True, frozen=True)
class Given:
    """A value as one source gave it. `typed` values come from YAML, the others are text."""

    value: Any
    origin: str
    typed: bool


@dataclass(slots=True, frozen=True)
class FileContent:
    """What a settings file says."""

    shared: dict[str, Given]  #: its sections
    models: list[dict[str, Given]]  #: what each entry of `models` says; none: there is one model


#: Key of a file under which models are listed, and of the name of each.
MODELS, MODEL_NAME = "models", "name"
_ROOM_FIELDS = tuple(field for field in msgspec.structs.fields(Settings) if field.name != MODELS)


def _declared() -> Iterator[Setting]:
    for room in _ROOM_FIELDS:
        for field in msgspec.structs.fields(room.type):
            meta = next(arg for arg in get_args(field.type) if isinstance(arg, Meta))
            yield Setting(room.name, field.name, field.type, field.default, meta)


#: By field name, which is unique over all rooms: a flag needs no room in front.
SETTINGS: dict[str, Setting] = {setting.name: setting for setting in _declared()}
ROOMS: tuple[str, ...] = tuple(field.name for field in _ROOM_FIELDS)


_RESTART = "end it with homing stop and serve again"
_SHARED = ("publish_events", "events_curve_keys", "events_curve_clients", "heartbeat_interval_s")
_OF_THE_CLUSTER = ("name", "routers", "ray_address", "state_dir", "log_level", "stop_timeout_s")
#: What all models have in common.
COMMON = frozenset(
    {name for name, setting in SETTINGS.items() if setting.room == "router"} | {*_SHARED, *_OF_THE_CLUSTER}
)
#: What replicas are not started with, or what they share with routers that go on, and what to do instead.
FIXED: dict[str, str] = dict.fromkeys((*COMMON, "autoscale", "ttft_target_s", "scale_down_after_s"), _RESTART) | {
    "replicas": "say homing scale"
}
#: What is each model's own where several are listed: nobody means one model, or name, for all of them.
_NAMES = ("model", "served_model_name")


def load_settings(
    flags: Mapping[str, str] | None = None, environ: Mapping[str, str] | None = None, file: Path | None = None
) -> Settings:
    """Settings from all sources. `flags` maps field names to text. Raises SettingsError for the first mistake."""
    environ = os.environ if environ is None else environ
    content = _read(file or _file_of(environ))
    shared = content.shared | _from_environ(environ) | _from_flags(flags or {})
    if content.models and (named := [name for name in _NAMES if name in shared]):
        raise SettingsError(
            f"{shared[named[0]].origin}: {named[0]} is each model's own: set it where models are listed"
        )
    models = tuple(_settled(shared | own) for own in content.models)
    return msgspec.structs.replace(_settled(shared), models=models)


def changed_settings(
    running: Mapping[str, Settings], flags: Mapping[str, str], file: Path | None
) -> dict[str, Settings]:
    """What models of these names run with, and over it what a file and flags say, for those that are concerned.

    Models that only the file lists are `added_settings`'.

    Which model flags mean, and a file without `models`, the flag of `served_model_name` says where there are several.
    The environment has no say: it is that of whoever types the command, not of the cluster. Raises SettingsError for
    the first mistake.
    """
    content, given, meant = _read(file), _from_flags(flags), flags.get("served_model_name")
    if meant is not None and meant not in running:
        raise SettingsError(f"flag --served-model-name: no model {meant!r} runs here; there {_listed(running)}")
    own = {str(entry["served_model_name"].value): entry for entry in content.models}
    if own and (missing := [name for name in running if name not in own]):
        words = " ".join(f"--remove {name}" for name in missing)
        raise SettingsError(f"{file}: models: {', '.join(missing)} not listed; to take away what runs, say {words}")
    if meant is None and len(running) > 1 and (given or (content.shared and not own)):
        raise SettingsError(f"several models run here; say which with --served-model-name; there {_listed(running)}")
    concerned = list(running) if meant is None else [meant]
    return {name: _changed(running[name], content.shared | own.get(name, {}) | given) for name in concerned}


def added_settings(running: Mapping[str, Settings], file: Path | None) -> dict[str, Settings]:
    """What models that a file lists, and that do not run yet, are to run with.

    What all models have in common is the cluster's, all else the file's: neither flags nor the environment of the one
    who started the cluster are known here. Raises SettingsError for the first mistake.
    """
    content, cluster = _read(file), next(iter(running.values()))
    own = {str(entry["served_model_name"].value): entry for entry in content.models}
    new = {name: content.shared | entry for name, entry in own.items() if name not in running}
    return {name: _added(cluster, given) for name, given in new.items()}


def _listed(running: Iterable[str]) -> str:
    names = list(running)
    return f"{'is' if len(names) == 1 else 'are'} {', '.join(names)}"


def _settled(given: Mapping[str, Given]) -> Settings:
    rooms: dict[str, dict[str, Any]] = {room: {} for room in ROOMS}
    for name, source in given.items():
        setting = SETTINGS[name]
        rooms[setting.room][name] = _convert(setting, source)
    return msgspec.convert(rooms, Settings)


def _added(cluster: Settings, given: Mapping[str, Given]) -> Settings:
    common = COMMON.difference(_NAMES)
    _changed(cluster, {name: source for name, source in given.items() if name in common})
    settled = _settled({name: source for name, source in given.items() if name not in common})
    rooms = {
        room: {name: getattr(getattr(cluster, room), name) for name in common if SETTINGS[name].room == room}
        for room in ROOMS
    }
    shared = {room: msgspec.structs.replace(getattr(settled, room), **values) for room, values in rooms.items()}
    return msgspec.structs.replace(settled, **shared)


def _changed(running: Settings, given: Mapping[str, Given]) -> Settings:
    rooms: dict[str, dict[str, Any]] = {room: {} for room in ROOMS}
    for name, source in given.items():
        setting = SETTINGS[name]
        value = _convert(setting, source)
        if value != getattr(getattr(running, setting.room), name) and name in FIXED:
            raise SettingsError(f"{source.origin}: {name} cannot change while the cluster runs; {FIXED[name]}")
        rooms[setting.room][name] = value
    changed = {room: msgspec.structs.replace(getattr(running, room), **values) for room, values in rooms.items()}
    return msgspec.structs.replace(running, **changed)


def state_folder(settings: Settings, environ: Mapping[str, str] | None = None) -> Path:
    """Where running clusters of this user are noted (it need not exist)."""
    environ = os.environ if environ is None else environ
    if settings.cluster.state_dir:
        return Path(settings.cluster.state_dir).expanduser().absolute()
    base = environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "homing"


def nearest(word: str, words: Iterable[str]) -> str:
    """`; did you mean X?`, or nothing when no word is near."""
    found = difflib.get_close_matches(word, list(words), n=1, cutoff=0.6)
    return f"; did you mean {found[0]}?" if found else ""


def _file_of(environ: Mapping[str, str]) -> Path | None:
    named = environ.get(VARIABLE_PREFIX + "CONFIG")
    return Path(named) if named else None


def _from_flags(flags: Mapping[str, str]) -> dict[str, Given]:
    return {name: Given(value, f"flag {SETTINGS[name].flag}", typed=False) for name, value in flags.items()}


def _from_environ(environ: Mapping[str, str]) -> dict[str, Given]:
    by_variable = {setting.variable: setting for setting in SETTINGS.values()}
    known = {*by_variable, VARIABLE_PREFIX + "CONFIG"}
    for variable in environ:
        if variable.startswith(VARIABLE_PREFIX) and variable not in known:
            raise SettingsError(f"environment variable {variable}: no such setting{nearest(variable, known)}")
    return {
        setting.name: Given(environ[variable], f"environment variable {variable}", typed=False)
        for variable, setting in by_variable.items()
        if variable in environ
    }


def _read(path: Path | None) -> FileContent:
    if path is None:
        return FileContent({}, [])
    sections = _read_yaml(path)
    entries = sections.pop(MODELS, None)
    return FileContent(_sections(path, sections), [] if entries is None else _entries(path, entries))


def _entries(path: Path, entries: Any) -> list[dict[str, Given]]:
    """What is said of each model."""
    if not isinstance(entries, list) or not entries:
        raise SettingsError(f"{path}: models must be a list of at least one model, not {entries!r}")
    models = [_entry(path, f"models[{index}]", entry) for index, entry in enumerate(entries)]
    names = [model["served_model_name"].value for model in models]
    for index, name in enumerate(names):
        if name in names[:index]:
            before = names.index(name)
            raise SettingsError(f"{path}: models[{index}].name: models[{before}] is called {name!r} already")
    return models


def _entry(path: Path, where: str, entry: Any) -> dict[str, Given]:
    if not isinstance(entry, dict):
        raise SettingsError(f"{path}: {where} must map keys to values, not be {entry!r}")
    for key in (MODEL_NAME, "model"):
        if not isinstance(entry.get(key), str) or not entry[key]:
            raise SettingsError(f"{path}: {where}.{key}: give {_WANTED[key]}, not {entry.get(key)!r}")
    return {
        _own_key(path, where, str(key)): Given(value, f"{path}, {where}.{key}", typed=True)
        for key, value in entry.items()
    }


_WANTED = {MODEL_NAME: "the name that requests use", "model": "a Hugging Face name or a local folder"}


def _own_key(path: Path, where: str, key: str) -> str:
    """The setting that a key of a model's entry means."""
    if key == MODEL_NAME:
        return "served_model_name"
    if key in COMMON:
        raise SettingsError(f"{path}: {where}.{key}: it is common to all models{_where(key)}")
    if key not in SETTINGS:
        hint = f"; its settings stand beside {MODEL_NAME}, without sections" if key in ROOMS else ""
        raise SettingsError(f"{path}: {where}.{key}: no such setting{hint or nearest(key, SETTINGS.keys() - COMMON)}")
    return key


def _sections(path: Path, sections: Mapping[Any, Any]) -> dict[str, Given]:
    given: dict[str, Given] = {}
    for room, section in sections.items():
        if room not in ROOMS:
            known = (*ROOMS, MODELS)
            raise SettingsError(f"{path}: no section {room!r}{_where(str(room)) or nearest(str(room), known)}")
        if section is None:
            continue
        if not isinstance(section, dict):
            raise SettingsError(f"{path}: section {room!r} must map keys to values, not be {section!r}")
        for key, value in section.items():
            given[_known_key(path, room, str(key))] = Given(value, f"{path}, {room}.{key}", typed=True)
    return given


def _read_yaml(path: Path) -> dict[Any, Any]:
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise SettingsError(f"cannot read settings file {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is no YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(
            f"{path}: the top level must map sections ({', '.join(ROOMS)}) to settings, or list {MODELS}"
        )
    return content


def _known_key(path: Path, room: str, key: str) -> str:
    setting = SETTINGS.get(key)
    if setting is not None and setting.room == room:
        return key
    own = [name for name, candidate in SETTINGS.items() if candidate.room == room]
    raise SettingsError(f"{path}: no setting {key!r} in section {room!r}{_where(key) or nearest(key, own)}")


def _where(key: str) -> str:
    return f"; it belongs into section {SETTINGS[key].room!r}" if key in SETTINGS else ""


def _convert(setting: Setting, given: Given) -> Any:
    try:
        value = msgspec.convert(given.value, setting.type, strict=given.typed)
    except msgspec.ValidationError as error:
        hint = nearest(str(given.value), setting.choices) if setting.choices else ""
        raise SettingsError(
            f"{given.origin}: {given.value!r} does not do for {setting.name}: {_reason(setting, error)}{hint}"
        ) from error
    if isinstance(value, float) and not math.isfinite(value):
        raise SettingsError(f"{given.origin}: {given.value!r} does not do for {setting.name}: give a finite number")
    return value


def _reason(setting: Setting, error: msgspec.ValidationError) -> str:
    return f"expected one of {', '.join(setting.choices)}" if setting.choices else str(error)


def markdown() -> str:
    """The content of docs/settings.md."""
    lines = [
        "# Settings",
        "",
        "Generated by `python -m homing.cluster.config > docs/settings.md`; a test holds it. A setting is a flag",
        "(`--block-size 32`; a switch is `--hash-only` or `--no-hash-only`), an environment variable",
        "(`HOMING_BLOCK_SIZE=32`) and a key in the file that `--config FILE` or `HOMING_CONFIG` names, in the section",
        "of its room:",
        "",
        "```yaml",
        "kvcache:",
        "  block_size: 32",
        "cluster:",
        "  replicas: 4",
        "```",
        "",
        "A flag wins over a variable, a variable over the file, the file over the default. An unknown or malformed",
        "setting is an error that names it, its source and the nearest spelling.",
        "",
        "Several models on one cluster are listed in that file, each with the `name` that requests use, its `model`",
        "and what else is its own; all else is taken from where it is set for all, flags and variables included:",
        "",
        "```yaml",
        "models:",
        "  - name: small",
        "    model: Qwen/Qwen3-0.6B",
        "  - name: large",
        "    model: Qwen/Qwen3-8B",
        "    tensor_parallel_size: 2",
        '    autoscale: "0:4"',
        "    block_size: 32",
        "cluster:",
        "  gpus_per_rank: 1",
        "```",
        "",
        "Common to all models are the settings of the section `router` and "
        + ", ".join(f"`{name}`" for name in (*_SHARED, *_OF_THE_CLUSTER))
        + ".",
    ]
    for room in _ROOM_FIELDS:
        summary = (room.type.__doc__ or "").splitlines()[0]
        lines += ["", f"## {room.name}", "", summary, "", "| key | flag | variable | default | allowed | |"]
        lines += ["|---|---|---|---|---|---|"]
        lines += [_row(setting) for setting in SETTINGS.values() if setting.room == room.name]
    return "\n".join(lines) + "\n"


def _row(setting: Setting) -> str:
    default = {"": "empty", "True": "true", "False": "false"}.get(str(setting.default), str(setting.default))
    return (
        f"| `{setting.name}` | {', '.join(f'`{flag}`' for flag in setting.flags)} | `{setting.variable}` | {default} "
        f"| {_allowed(setting)} | {setting.description} |"
    )


def _allowed(setting: Setting) -> str:
    if allowed := (setting.meta.extra or {}).get("allowed"):
        return str(allowed)
    if setting.choices:
        return ", ".join(setting.choices)
    name = {bool: "true or false", int: "integer", float: "number", str: "text"}[setting.bare_type]
    bounds = [("≥", setting.meta.ge), (">", setting.meta.gt), ("≤", setting.meta.le), ("<", setting.meta.lt)]
    return " ".join([name, *(f"{sign} {bound}" for sign, bound in bounds if bound is not None)])


if __name__ == "__main__":
    print(markdown(), end="")
