"""All settings in one tree, and their four sources: default, file, environment, flag (later ones take precedence).

A setting is declared once, as a field of its package's struct. Its YAML key, flag, environment variable and row in
docs/settings.md are derived from the field. This is the only module that reads HOMING_* variables.
"""

import difflib
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

from ..events.config import EventsSettings
from ..kvcache.config import KvCacheSettings
from ..replica.config import ReplicaSettings
from ..router.config import RouterSettings
from ..router.strict_yaml import InvalidYamlError, parse_yaml
from .errors import SettingsError
from .logs import LogFormat

VARIABLE_PREFIX = "HOMING_"


class ClusterSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many replicas run, where they run, and how they are monitored."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$"), "name of the cluster on this machine"] = (
        "default"
    )
    replicas: Annotated[
        int,
        Meta(ge=0, le=4096, extra={"least": 1}),
        "number of replicas; unset: one per GPU, or 2 without GPUs",
    ] = 0
    autoscale: Annotated[
        str,
        Meta(pattern=r"^(\d+:\d+)?$"),
        "MIN:MAX: let the number of replicas follow the load",
    ] = ""
    ttft_target_s: Annotated[float, Meta(gt=0), "time to first token above which autoscaling adds replicas"] = 1.0
    scale_down_after_s: Annotated[float, Meta(gt=0), "idle seconds after which autoscaling removes a replica"] = 120.0
    routers: Annotated[int, Meta(ge=1, le=64), "router processes on one port"] = 1
    ray_address: Annotated[
        str,
        Meta(extra={"alias": "--address"}),
        "Ray cluster to join, such as auto or host:6379; empty: a local one",
    ] = ""
    cpus_per_rank: Annotated[float, Meta(ge=0), "CPUs that a joined Ray cluster reserves for a rank"] = 1.0
    gpus_per_rank: Annotated[
        float,
        Meta(ge=0),
        "GPUs for a rank, or a part of one; 0: one if there are any",
    ] = 0.0
    start_timeout_s: Annotated[float, Meta(gt=0), "seconds in which a replica must be ready"] = 600.0
    health_timeout_s: Annotated[float, Meta(gt=0), "seconds without an answer after which a rank has failed"] = 30.0
    step_timeout_s: Annotated[
        float,
        Meta(gt=0),
        "seconds after which a step hangs; at least ten full steps",
    ] = 120.0
    drain_timeout_s: Annotated[
        float, Meta(gt=0), "seconds after which requests on a draining replica continue elsewhere"
    ] = 60.0
    spare_process: Annotated[
        bool,
        "keep spare processes, so that a failed one is back in 1 to 3 s",
    ] = True
    surge: Annotated[bool, "in updates, start a replica before draining one"] = True
    warm_up_s: Annotated[float, Meta(gt=0), "longest warm-up of a new replica"] = 10.0
    stop_timeout_s: Annotated[float, Meta(gt=0), "seconds to shut down before processes are killed"] = 8.0
    state_dir: Annotated[str, "folder that lists running clusters; empty: ~/.local/state/homing"] = ""
    log_format: Annotated[LogFormat, "format of logs"] = "text"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], "least severe lines that are logged; debug includes Ray's"
    ] = "info"


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings, by package. With several models, `models` holds the complete settings of each."""

    kvcache: KvCacheSettings = KvCacheSettings()
    events: EventsSettings = EventsSettings()
    replica: ReplicaSettings = ReplicaSettings()
    router: RouterSettings = RouterSettings()
    cluster: ClusterSettings = ClusterSettings()
    models: tuple["Settings", ...] = ()

    @property
    def each_model(self) -> tuple["Settings", ...]:
        """The settings of each model, at least one."""
        return self.models or (self,)

    @property
    def ranks(self) -> int:
        """Number of processes of this model's replicas at the start."""
        return self.cluster.replicas * self.replica.tensor_parallel_size

    @property
    def served_name(self) -> str:
        return self.router.served_model_name


@dataclass(slots=True, frozen=True)
class Setting:
    section: str
    name: str
    type: Any
    default: Any
    meta: Meta
    help: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def flags(self) -> tuple[str, ...]:
        alias = (self.meta.extra or {}).get("alias")
        return (self.flag, alias) if alias else (self.flag,)

    @property
    def variable(self) -> str:
        return VARIABLE_PREFIX + self.name.upper()

    @property
    def bare_type(self) -> Any:
        return get_args(self.type)[0]

    @property
    def choices(self) -> tuple[str, ...] | None:
        return get_args(self.bare_type) if get_origin(self.bare_type) is Literal else None


@dataclass(slots=True, frozen=True)
class SourcedValue:
    """A value from one source. `typed` is True for YAML values and False for text."""

    value: Any
    origin: str
    typed: bool


def _setting(section: str, field: msgspec.structs.FieldInfo) -> Setting:
    """The setting that a field declares: `Annotated[type, help]` or `Annotated[type, Meta(...), help]`."""
    *bounds, text = field.type.__metadata__
    return Setting(section, field.name, field.type, field.default, bounds[0] if bounds else Meta(), text)


#: The settings in a file's sections, and those of each entry in its `models`, by name. Without entries, one model.
FileContent = tuple[dict[str, SourcedValue], dict[str, dict[str, SourcedValue]]]
#: File keys of the list of models and of each model's name.
MODELS, MODEL_NAME = "models", "name"
_SECTION_TYPES = {field.name: field.type for field in msgspec.structs.fields(Settings) if field.name != MODELS}
SECTIONS: tuple[str, ...] = tuple(_SECTION_TYPES)
#: All settings by field name, which is unique across packages.
SETTINGS: dict[str, Setting] = {
    field.name: _setting(section, field)
    for section, struct in _SECTION_TYPES.items()
    for field in msgspec.structs.fields(struct)
}
#: Settings that all models share, in addition to those of the router.
SHARED = (
    *("publish_events", "events_curve_keys", "events_curve_clients", "heartbeat_interval_s"),
    *("name", "routers", "ray_address", "state_dir", "log_format", "log_level", "stop_timeout_s"),
)
#: All settings that all models share.
COMMON = frozenset({name for name, setting in SETTINGS.items() if setting.section == "router"} | {*SHARED})
#: Settings that an update cannot change, because routers keep running with them, and what to do instead.
FIXED: dict[str, str] = {
    **dict.fromkeys(
        (*COMMON, "autoscale", "ttft_target_s", "scale_down_after_s"), "stop it with homing stop and start it again"
    ),
    "replicas": "use homing scale",
}
#: Settings that name a file or folder. They are made absolute, as other processes may run in another folder, and an
#: update compares them with those of the running cluster.
PATHS = frozenset(
    {
        *("api_keys_file", "access_log", "chat_template", "response_store", "tls_cert_file", "tls_key_file"),
        *("events_curve_keys", "tokenizer", "engine_python", "disk_kv"),
    }
)
#: Settings that are gone, and what happens instead. A setting with a similar name would often mean something else.
REMOVED = {
    "eviction": "the block that was idle longest is evicted first",
    "health_interval_s": "ranks are asked every 2 s",
    "max_unsent_bytes": "a client that leaves 1 MiB unread is disconnected",
    "pin_ttl_s": "cache_control without a ttl keeps a prefix for 5 minutes",
    "prefill_step_tokens": "a step takes prompts for about 0.1 s",
    "publish_queue_batches": "10,000 batches are queued",
    "reservation_timeout_s": "blocks are held for a waiting request until it runs",
    "response_store_count": "100,000 responses are stored, within response_store_bytes and response_store_age_s",
    "restart_backoff_limit_s": "the pause between restarts grows to 30 s",
    "restart_backoff_s": "the pause before the second restart is 1 s",
    "send_high_water_mark": "100,000 messages are queued for each subscriber",
    "stable_after_s": "what served for 10 s restarts without a pause",
    "stall_timeout_s": "a client that reads nothing for 30 s is disconnected",
    "warm_up_bytes": "recent prompts take up to 8 MiB; warm_up_share 0 keeps none",
}
#: Settings that cannot be shared by several models.
_NAMES = ("model", "served_model_name")


def load_settings(
    flags: Mapping[str, str] | None = None, environ: Mapping[str, str] | None = None, file: Path | None = None
) -> Settings:
    """Load settings from all sources. `flags` maps field names to text. Raises SettingsError for the first error."""
    environ = os.environ if environ is None else environ
    named = environ.get(VARIABLE_PREFIX + "CONFIG")
    shared, own = _read(file or (Path(named) if named else None))
    shared = shared | _from_environ(environ) | _from_flags(flags or {})
    for name in _NAMES if own else ():
        if name in shared:
            raise SettingsError(f"{shared[name].origin}: each model has its own {name}: set it in the list of models")
    models = tuple(_settings_from(shared | given) for given in own.values())
    return msgspec.structs.replace(_settings_from(shared), models=models)


def changed_settings(
    running: Mapping[str, Settings], flags: Mapping[str, str], file: Path | None
) -> dict[str, Settings]:
    """Return the settings of the affected running models with the changes in a file and flags applied.

    With several models, flags and a file without `models` apply to the model that `served_model_name` names.
    `added_settings` returns the file's new models. Environment variables are ignored: they belong to the shell of this
    command, not to the cluster. Raises SettingsError for the first error.
    """
    (shared, own), given, target = _read(file), _from_flags(flags), flags.get("served_model_name")
    if target is not None and target not in running:
        raise SettingsError(
            f"flag --served-model-name: model {target!r} is not served here (served: {', '.join(running)})"
        )
    if own and (missing := [name for name in running if name not in own]):
        words = " ".join(f"--remove {name}" for name in missing)
        raise SettingsError(f"{file}: models: {', '.join(missing)} not listed; to stop serving them, add {words}")
    if target is None and len(running) > 1 and (given or (shared and not own)):
        raise SettingsError(f"several models are served; choose one with --served-model-name ({', '.join(running)})")
    affected = list(running) if target is None else [target]
    return {name: _changed(running[name], shared | own.get(name, {}) | given) for name in affected}


def added_settings(running: Mapping[str, Settings], file: Path | None) -> dict[str, Settings]:
    """Return the settings of the models in a file that are not served yet.

    Settings that all models share come from the cluster, others from the file. Raises SettingsError for a first error.
    """
    (shared, models), cluster = _read(file), next(iter(running.values()))
    return {name: _added(cluster, shared | own) for name, own in models.items() if name not in running}


def replaced(settings: Settings, **values: Any) -> Settings:
    """Return the settings with some values replaced, by field name."""
    sections: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for name, value in values.items():
        sections[SETTINGS[name].section][name] = value
    changed = {name: msgspec.structs.replace(getattr(settings, name), **own) for name, own in sections.items()}
    return msgspec.structs.replace(settings, **changed)


def _settings_from(given: Mapping[str, SourcedValue]) -> Settings:
    return replaced(Settings(), **{name: _convert(SETTINGS[name], source) for name, source in given.items()})


def _added(cluster: Settings, given: Mapping[str, SourcedValue]) -> Settings:
    common = COMMON.difference(_NAMES)
    _changed(cluster, {name: source for name, source in given.items() if name in common})
    own = _settings_from({name: source for name, source in given.items() if name not in common})
    return replaced(own, **{name: getattr(getattr(cluster, SETTINGS[name].section), name) for name in common})


def _changed(running: Settings, given: Mapping[str, SourcedValue]) -> Settings:
    values = {name: _convert(SETTINGS[name], source) for name, source in given.items()}
    for name, value in values.items():
        if value != getattr(getattr(running, SETTINGS[name].section), name) and name in FIXED:
            raise SettingsError(f"{given[name].origin}: {name} cannot change while the cluster runs; {FIXED[name]}")
    return replaced(running, **values)


def state_folder(settings: Settings, environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder of this user's registry of running clusters, which may not exist yet."""
    environ = os.environ if environ is None else environ
    if settings.cluster.state_dir:
        return Path(settings.cluster.state_dir).expanduser().absolute()
    base = environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "homing"


def router_url(router: RouterSettings, port: int) -> str:
    """Return the URL at which this machine reaches a router with these settings on this port."""
    host = "127.0.0.1" if router.host in ("0.0.0.0", "::", "") else router.host
    name = f"[{host}]" if ":" in host else host
    return f"{'https' if router.tls_cert_file else 'http'}://{name}:{port}"


def removed(word: str) -> str:
    """Return `; it was removed: WHY` for a key, flag or variable of a setting that is gone, else an empty string."""
    name = word.removeprefix(VARIABLE_PREFIX).removeprefix("--").removeprefix("no-").replace("-", "_").lower()
    return f"; it was removed: {REMOVED[name]}" if name in REMOVED else ""


def nearest(word: str, words: Iterable[str]) -> str:
    """Return `; did you mean X?`, or an empty string when no word is similar."""
    found = difflib.get_close_matches(word, list(words), n=1, cutoff=0.6)
    return f"; did you mean {found[0]}?" if found else ""


def _from_flags(flags: Mapping[str, str]) -> dict[str, SourcedValue]:
    return {name: SourcedValue(value, f"flag {SETTINGS[name].flag}", typed=False) for name, value in flags.items()}


def _from_environ(environ: Mapping[str, str]) -> dict[str, SourcedValue]:
    known = {setting.variable: name for name, setting in SETTINGS.items()} | {VARIABLE_PREFIX + "CONFIG": None}
    given = {}
    for variable, value in environ.items():
        if variable.startswith(VARIABLE_PREFIX) and variable not in known:
            raise SettingsError(
                f"environment variable {variable}: no such setting{removed(variable) or nearest(variable, known)}"
            )
        if name := known.get(variable):
            given[name] = SourcedValue(value, f"environment variable {variable}", typed=False)
    return given


def _read(path: Path | None) -> FileContent:
    if path is None:
        return {}, {}
    try:
        content = parse_yaml(path.read_bytes())
    except OSError as error:
        raise SettingsError(f"cannot read settings file {path}: {error.strerror}") from error
    except InvalidYamlError as error:
        raise SettingsError(f"{path} is not valid YAML: {error}") from error
    if content is None:
        return {}, {}
    if not isinstance(content, dict):
        raise SettingsError(
            f"{path}: the top level must map sections ({', '.join(SECTIONS)}) to settings, or list {MODELS}"
        )
    entries = content.pop(MODELS, None)
    return _sections(path, content), {} if entries is None else _entries(path, entries)


def _entries(path: Path, entries: Any) -> dict[str, dict[str, SourcedValue]]:
    if not isinstance(entries, list) or not entries:
        raise SettingsError(f"{path}: models must be a list of at least one model, not {entries!r}")
    models: dict[str, dict[str, SourcedValue]] = {}
    for index, entry in enumerate(entries):
        model = _entry(path, f"models[{index}]", entry)
        name = model["served_model_name"].value
        if name in models:
            raise SettingsError(
                f"{path}: models[{index}].name: models[{list(models).index(name)}] has the name {name!r}"
            )
        models[name] = model
    return models


def _entry(path: Path, where: str, entry: Any) -> dict[str, SourcedValue]:
    if not isinstance(entry, dict):
        raise SettingsError(f"{path}: {where} must map keys to values, not be {entry!r}")
    for key, meaning in (
        (MODEL_NAME, "the name that requests use"),
        ("model", "a Hugging Face name or a local folder"),
    ):
        if not isinstance(entry.get(key), str) or not entry[key]:
            raise SettingsError(f"{path}: {where}.{key}: give {meaning}, not {entry.get(key)!r}")
    given: dict[str, SourcedValue] = {}
    for key, value in ((str(key), value) for key, value in entry.items()):
        name = "served_model_name" if key == MODEL_NAME else key
        if key in COMMON and key != MODEL_NAME:
            raise SettingsError(f"{path}: {where}.{key}: all models share this setting{_section_hint(key)}")
        if name not in SETTINGS:
            hint = f"; put its settings next to {MODEL_NAME}, without sections" if key in SECTIONS else removed(key)
            raise SettingsError(
                f"{path}: {where}.{key}: no such setting{hint or nearest(key, SETTINGS.keys() - COMMON)}"
            )
        given[name] = SourcedValue(value, f"{path}, {where}.{key}", typed=True)
    return given


def _sections(path: Path, sections: Mapping[Any, Any]) -> dict[str, SourcedValue]:
    given: dict[str, SourcedValue] = {}
    for section, content in sections.items():
        if section not in SECTIONS:
            hint = _section_hint(str(section)) or nearest(str(section), (*SECTIONS, MODELS))
            raise SettingsError(f"{path}: no section {section!r}{hint}")
        if content is not None and not isinstance(content, dict):
            raise SettingsError(f"{path}: section {section!r} must map keys to values, not be {content!r}")
        own = [setting.name for setting in SETTINGS.values() if setting.section == section]
        for key, value in (content or {}).items():
            if key not in own:
                hint = _section_hint(str(key)) or removed(str(key)) or nearest(str(key), own)
                raise SettingsError(f"{path}: no setting {str(key)!r} in section {section!r}{hint}")
            given[key] = SourcedValue(value, f"{path}, {section}.{key}", typed=True)
    return given


def _section_hint(key: str) -> str:
    return f"; it belongs in section {SETTINGS[key].section!r}" if key in SETTINGS else ""


def _expected(setting: Setting, given: str) -> str:
    """What a setting with choices accepts. Of many, those that `allowed` describes, only the one meant is named."""
    choices, meant = setting.choices or (), nearest(given, setting.choices or ())
    many = (setting.meta.extra or {}).get("allowed")
    return f"expected one of {', '.join(choices)}{meant}" if not many else f"expected one of {many}{meant}"


def _convert(setting: Setting, given: SourcedValue) -> Any:
    try:
        # Help and documentation say on and off; msgspec knows true, false, 1 and 0.
        switched = setting.bare_type is bool and given.value in ("on", "off")
        value = given.value == "on" if switched else msgspec.convert(given.value, setting.type, strict=given.typed)
    except msgspec.ValidationError as error:
        reason = _expected(setting, str(given.value)) if setting.choices else error
        raise SettingsError(f"{given.origin}: {given.value!r} is not valid for {setting.name}: {reason}") from error
    # 0 stands for a value that was not given. Elsewhere, as in `homing scale 0`, it means none.
    if isinstance(value, int) and value < ((setting.meta.extra or {}).get("least") or value):
        raise SettingsError(
            f"{given.origin}: {value} is not valid for {setting.name}: give at least 1, or leave it out; "
            "homing scale 0 and autoscale 0:MAX end all replicas"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise SettingsError(f"{given.origin}: {given.value!r} is not valid for {setting.name}: give a finite number")
    # Only paths begin with ~, and all code that expands one may rely on this check.
    if isinstance(value, str) and value.startswith("~") and os.path.expanduser(value) == value:
        raise SettingsError(f"{given.origin}: {value!r} is not valid for {setting.name}: there is no such home folder")
    if setting.name in PATHS and str(value).startswith("--"):
        raise SettingsError(f"{given.origin}: give a file, not {value}")
    if setting.name in PATHS and value not in ("", "-"):
        # Links are not resolved: a virtual environment's Python is a link, and its location identifies the environment.
        return str(Path(value).expanduser().absolute())
    return value
