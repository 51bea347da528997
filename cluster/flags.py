"""Command flags for settings, derived from `config.SETTINGS`, and the parameters that several commands share.

A command is a function whose parameters cyclopts turns into arguments and flags. A parameter such as
`flags: FindCluster` receives the settings of a group that the user gave; `settings_of` converts them to `Settings`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, TextIO, TypedDict

from cyclopts import Parameter

from .config import SETTINGS, Setting, Settings, load_settings
from .errors import SettingsError

#: Settings with which a command finds a running cluster.
LOOKUP = ("name", "state_dir")
#: The values given for each setting, in command-line order, and the settings file as `config`.
FlagValues = Mapping[str, Any]
NOTHING: FlagValues = MappingProxyType({})


def option(text: str, *names: str, **more: Any) -> Parameter:
    """Declare an argument or flag with this help text. `names` are needed if they differ from the parameter's name."""
    return Parameter(**{"name": names or None, "help": text, "negative": (), "show_default": _shown_default} | more)


def _shown_default(value: Any) -> str | None:
    return None if value in (None, False, "", ()) else str(value)


def group_of(*names: str, file: str = "YAML file of settings") -> Any:
    """Return the type of a parameter that receives the given ones of these settings. `file`: help of `--config`."""
    fields: dict[str, Any] = {"config": Annotated[Path, option(file, metavar="FILE")]}
    fields |= {name: _flag(SETTINGS[name]) for name in names}
    return Annotated[TypedDict("FlagValues", fields, total=False), Parameter(name="*")]  # type: ignore[operator]


def _flag(setting: Setting) -> Any:
    default = "empty" if setting.default == "" else str(setting.default).replace("True", "on").replace("False", "off")
    text = f"{setting.help} (default: {default})"
    group, completed = f"Settings: {setting.section}", setting.choices or ()
    if setting.bare_type is bool:
        off = setting.flag.replace("--", "--no-", 1)
        return Annotated[list[bool], option(text, *setting.flags, negative=off, group=group)]
    metavar = "|".join(setting.choices) if setting.choices else setting.bare_type.__name__.upper()
    hyphen = bool((setting.meta.extra or {}).get("arguments"))
    more: dict[str, Any] = {"metavar": metavar, "group": group, "allow_leading_hyphen": hyphen}
    # A list, because the last of several values counts. Of str, so that all sources share one validation of values.
    return Annotated[list[str], option(text, *setting.flags, completer=lambda _: completed, **more)]


def texts(flags: FlagValues) -> dict[str, str]:
    """Return the given settings as text, by name."""
    repeatable = {name for name, setting in SETTINGS.items() if (setting.meta.extra or {}).get("repeatable")}
    return {
        name: ",".join(values) if name in repeatable else str(values[-1])
        for name, values in flags.items()
        if name != "config"
    }


def settings_of(flags: FlagValues, model: str | None = None) -> Settings:
    """Return a command's settings. `model` is the one given as an argument. Raises SettingsError."""
    return load_settings(with_model(texts(flags), model), file=flags.get("config"))


def with_model(flags: dict[str, str], model: str | None) -> dict[str, str]:
    if model and "model" in flags:
        raise SettingsError(f"the model is given twice: {model} and --model {flags['model']}")
    return flags | {"model": model} if model else flags


if TYPE_CHECKING:
    AllSettings = FlagValues
    Changes = FlagValues
    FindCluster = FlagValues
    FollowEvents = FlagValues
    TextSettings = FlagValues
else:
    AllSettings = group_of(*SETTINGS)
    Changes = group_of(
        *SETTINGS, file="YAML file of changes: settings that it omits stay the same; new models are started"
    )
    _FILE = "YAML file of settings with which the cluster was started"
    FindCluster = group_of(*LOOKUP, file=_FILE)
    FollowEvents = group_of(*LOOKUP, "events_curve_keys", "heartbeat_interval_s", file=_FILE)
    TextSettings = group_of("model", "tokenizer")

#: The stream that receives the command's output.
Out = Annotated[TextIO, Parameter(parse=False)]
#: The whole command line.
Words = Annotated[Sequence[str], Parameter(parse=False)]
Url = Annotated[str | None, option("URL of a cluster (default: the one on this machine)", metavar="URL")]
NoWait = Annotated[bool, option("return immediately")]
Detach = Annotated[bool, option("run in the background; return when the cluster is ready")]
Quiet = Annotated[bool, option("do not print a line for each request (homing logs requests shows them)")]
Background = Annotated[bool, option("the process that --detach starts", show=False)]
ServedModel = Annotated[
    str | None,
    option("name of the model, if several are served", SETTINGS["served_model_name"].flag, metavar="NAME"),
]
