"""The command line: words in, one call out. Flags of settings are derived from `config.SETTINGS`.

Exit codes: 0 done, 1 it failed, 2 the command or its settings are wrong.
"""

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO, get_args

from ... import __version__
from ...kvcache.eviction import EvictionName
from ..config import ROOMS, SETTINGS, Setting, Settings, load_settings, nearest
from ..errors import ClusterError, SettingsError

DESCRIPTION = "Serve a language model on many replicas; requests find their way to the one that holds their prefix."
EPILOG = "Settings are flags, HOMING_* variables and keys of the file given by --config: docs/settings.md."
#: What a command that only asks needs to find the cluster.
LOOKUP = ("name", "state_dir")


class Parser(argparse.ArgumentParser):
    """An argparse parser whose mistakes are ours: one line, with the nearest spelling."""

    def error(self, message: str) -> NoReturn:
        """Any mistake in the command."""
        raise SettingsError(f"{message} (see: {self.prog} --help)")

    def flags(self) -> list[str]:
        """All flags of this command."""
        return [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]


class JoinAction(argparse.Action):
    """A flag that may be given again adds to its list."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:  # noqa: ARG002
        """See argparse."""
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, values if before is None else f"{before},{values}")


@dataclass(slots=True, frozen=True)
class Command:
    """One word after `homing`."""

    summary: str
    arguments: Callable[[Parser], None]
    run: Callable[[argparse.Namespace, TextIO], int]  #: imports what it needs: a command line must start at once


def build_parser() -> tuple[Parser, dict[str, Parser]]:
    """The parser and those of the commands."""
    parser = Parser(prog="homing", description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"homing {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    built: dict[str, Parser] = {}
    for name, command in COMMANDS.items():
        description = command.summary.capitalize() + "."
        built[name] = commands.add_parser(name, help=command.summary, description=description, allow_abbrev=False)
        command.arguments(built[name])
    return parser, built


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The command and its arguments, and as `words` all of them as given.

    Raises SettingsError; `--help` and `--version` exit.
    """
    parser, commands = build_parser()
    if words and not words[0].startswith("-") and words[0] not in commands:
        raise SettingsError(f"no command {words[0]!r}{nearest(words[0], commands)} (see: homing --help)")
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        known = commands[arguments.command].flags() if arguments.command else []
        word = unknown[0].partition("=")[0]
        where = f"{arguments.command}: " if arguments.command else ""
        raise SettingsError(f"{where}unknown argument {word}{nearest(word, known)}")
    arguments.words = words
    return arguments


def given_flags(arguments: argparse.Namespace) -> dict[str, str]:
    """Flags of settings, and the model where it has a place of its own, as text by setting."""
    given = {name: value for name, value in vars(arguments).items() if name in SETTINGS and value is not None}
    flags = {name: str(value) for name, value in given.items()}
    if model := getattr(arguments, "model_argument", None):
        if "model" in flags:
            raise SettingsError(f"the model is named twice: {model} and --model {flags['model']}")
        flags["model"] = model
    return flags


def settings_of(arguments: argparse.Namespace) -> Settings:
    """Settings from flags, environment and file."""
    flags = given_flags(arguments)
    file = getattr(arguments, "config", None)
    return load_settings(flags, file=Path(file) if file else None)


def run(words: Sequence[str], out: TextIO) -> int:
    """Carry out one command; returns the exit code. Raises ClusterError."""
    arguments = parse(words)
    if arguments.command is None:
        build_parser()[0].print_help(out)
        return 0
    return COMMANDS[arguments.command].run(arguments, out)


def main() -> int:
    """Entry point of the console script."""
    try:
        return run(sys.argv[1:], sys.stdout)
    except ClusterError as error:
        print(f"homing: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # The reader of our output went away (`homing watch | head`); flushing stdout at exit must not complain of it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def _serve(arguments: argparse.Namespace, out: TextIO) -> int:
    settings = settings_of(arguments)
    if arguments.detach:
        from .daemon import detach

        return detach(settings, [word for word in arguments.words if word != "--detach"], out)
    if settings.router.backend:
        from .attach import serve_backends

        return serve_backends(settings, out, detached=arguments.background)
    from .serve import serve

    return serve(settings, out, detached=arguments.background)


def _status(arguments: argparse.Namespace, out: TextIO) -> int:
    from .status import status

    return status(settings_of(arguments), out, url=arguments.url, as_json=arguments.json)


def _explain(arguments: argparse.Namespace, out: TextIO) -> int:
    from .explain import explain, read_key, request_body

    body = request_body(arguments.prompt, arguments.body, arguments.asked_model, raw=arguments.raw)
    api_key = read_key(arguments.api_key_file, sys.stdin)
    return explain(settings_of(arguments), out, body, url=arguments.url, api_key=api_key, as_json=arguments.json)


def _simulate(arguments: argparse.Namespace, out: TextIO) -> int:
    from ..lab.simulate.command import order_of, simulate

    # The other flags, such as --replicas, are those of the modelled cluster.
    settings = settings_of(argparse.Namespace(model=arguments.model, config=arguments.config))
    return simulate(order_of(vars(arguments)), settings, out, sys.stderr)


def _watch(arguments: argparse.Namespace, out: TextIO) -> int:
    from .watch import Viewing, replay, wanted, watch

    if arguments.rates is not None and not 0 < arguments.rates < math.inf:
        raise SettingsError(f"--rates {arguments.rates:g}: give seconds above 0")
    viewing = Viewing(
        wanted=wanted(arguments.replica or (), arguments.event or (), arguments.hash or ""),
        as_json=arguments.json,
        rates_s=arguments.rates,
        record=Path(arguments.record) if arguments.record else None,
    )
    if arguments.replay:
        return replay(Path(arguments.replay), out, viewing)
    return watch(settings_of(arguments), out, viewing, url=arguments.url)


def _scale(arguments: argparse.Namespace, out: TextIO) -> int:
    from .control import scale

    return scale(_lookup(arguments), out, arguments.model_name, arguments.replica_count, wait=arguments.wait)


def _drain(arguments: argparse.Namespace, out: TextIO) -> int:
    from .control import drain

    return drain(_lookup(arguments), out, arguments.replica, replace=arguments.replace, wait=arguments.wait)


def _update(arguments: argparse.Namespace, out: TextIO) -> int:
    from .control import Wish, update

    wish = Wish(
        flags={name: value for name, value in given_flags(arguments).items() if name not in LOOKUP},
        file=Path(arguments.config) if arguments.config else None,
        remove=arguments.remove,
        restart=arguments.restart,
    )
    return update(_lookup(arguments), out, wish, wait=arguments.wait)


def _lookup(arguments: argparse.Namespace) -> Settings:
    """What finds the cluster that a command is for; its own file is of settings to change."""
    return settings_of(argparse.Namespace(**{name: getattr(arguments, name) for name in LOOKUP}))


def _doctor(arguments: argparse.Namespace, out: TextIO) -> int:
    from .doctor import doctor

    return doctor(settings_of(arguments), out, as_json=arguments.json)


def _stop(arguments: argparse.Namespace, out: TextIO) -> int:
    from .stop import stop

    return stop(settings_of(arguments), out, force=arguments.force)


def _keys(arguments: argparse.Namespace, out: TextIO) -> int:
    from .keys import keys

    return keys(Path(arguments.folder), arguments.client, out)


def _analyze(arguments: argparse.Namespace, out: TextIO) -> int:
    from ..lab.analyze.command import analyze
    from ..lab.analyze.options import options_of

    return analyze(options_of(arguments), settings_of(arguments), out)


def _version(_: argparse.Namespace, out: TextIO) -> int:
    print(f"homing {__version__}", file=out)
    return 0


def _serve_arguments(parser: Parser) -> None:
    parser.add_argument(
        "model_argument",
        metavar="MODEL",
        nargs="?",
        help="Hugging Face name or local folder; without it, the demo model that ships with the package",
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings, one section per room")
    parser.add_argument("--detach", action="store_true", help="run in the background; return when it is ready")
    parser.add_argument("--background", action="store_true", help=argparse.SUPPRESS)
    _all_settings(parser)


def _doctor_arguments(parser: Parser) -> None:
    parser.add_argument("model_argument", metavar="MODEL", nargs="?", help="that is to be served")
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings")
    parser.add_argument("--json", action="store_true", help="print a list of findings, for programs")
    _all_settings(parser)


def _scale_arguments(parser: Parser) -> None:
    parser.add_argument("model_name", metavar="MODEL", nargs="?", help="name of the model, where there are several")
    parser.add_argument("replica_count", metavar="N", type=_count, help="replicas from now on")
    _control_arguments(parser)


def _drain_arguments(parser: Parser) -> None:
    parser.add_argument("replica", metavar="REPLICA", help="its name, such as r0")
    parser.add_argument("--replace", action="store_true", help="start another one in its place first")
    _control_arguments(parser)


def _update_arguments(parser: Parser) -> None:
    parser.add_argument("model_argument", metavar="MODEL", nargs="?", help="another model, or another version of it")
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML file; what it does not name stays as it is, models that it adds are started",
    )
    parser.add_argument(
        "--remove", metavar="NAME", action="append", default=[], help="serve this model no longer; may be given again"
    )
    parser.add_argument("--restart", action="store_true", help="replace every replica even when nothing changes")
    parser.add_argument("--no-wait", dest="wait", action="store_false", help="return at once")
    _all_settings(parser)


def _control_arguments(parser: Parser) -> None:
    parser.add_argument("--no-wait", dest="wait", action="store_false", help="return at once")
    _lookup_arguments(parser)


def _count(word: str) -> int:
    if not word.isdigit():
        raise argparse.ArgumentTypeError(f"{word!r} is no number of replicas")
    return int(word)


def _all_settings(parser: Parser) -> None:
    for room in ROOMS:
        group = parser.add_argument_group(f"{room} settings")
        for setting in SETTINGS.values():
            if setting.room == room:
                _add_setting(group, setting)


def _lookup_arguments(parser: Parser) -> None:
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings that the cluster was started with")
    for name in LOOKUP:
        _add_setting(parser, SETTINGS[name])


def _url_argument(parser: Parser) -> None:
    parser.add_argument("--url", metavar="URL", help="of a cluster; without it, the one that runs here")


def _status_arguments(parser: Parser) -> None:
    _url_argument(parser)
    _lookup_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print what /cluster answers, for programs")


def _simulate_arguments(parser: Parser) -> None:
    parser.add_argument(
        "trace",
        metavar="LOG",
        nargs="?",
        help="OpenAI requests or a Mooncake trace, as JSON lines; without it, conversations are drawn",
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings")
    _add_setting(parser, SETTINGS["model"])
    parser.add_argument(
        "--tokenizer", metavar="FOLDER", help="tokenizer and chat template for requests (default: the model's)"
    )
    _number(parser, "--output-tokens", int, "of each answer, where the log is of requests (default: 200)")
    parser.add_argument("--scenario", metavar="NAME", help="a prepared situation instead: docs/simulate.md lists them")
    policies = ", ".join(SETTINGS["policy"].choices or ())
    parser.add_argument(
        "--policies",
        metavar="NAMES",
        help=f"separated by commas, of: {policies}, oracle (default: ours beside the best of the others)",
    )
    _number(parser, "--replicas", int, "modelled replicas (default: 8)")
    _number(parser, "--routers", int, "routers that share no state (default: 1)")
    _number(parser, "--cache-blocks", int, "KV blocks of one replica (default: 4096)")
    _number(parser, "--block-tokens", int, "of a block (default: 512 for traces, else the setting)")
    parser.add_argument("--eviction", choices=get_args(EvictionName), help="what a full cache gives up (default: lru)")
    _number(parser, "--load", float, "share of what the replicas can do at best; sets the speed")
    _number(parser, "--speed", float, "how many times as fast as recorded (default: 1)")
    _number(parser, "--rate", float, "without a TRACE: conversations with so many requests a second (default: 4)")
    _number(parser, "--requests", int, "only so many, from the start")
    _number(parser, "--rounds", int, "the trace so many times, each time over new blocks (default: 1)")
    _number(parser, "--event-delay-ms", float, "from a replica's step to what routers know of it (default: 5)")
    _number(parser, "--event-loss", float, "share of published messages that a router never gets (default: 0)")
    _number(parser, "--resync-ms", float, "a replica's answer to a router that missed something (default: 20)")
    parser.add_argument(
        "--wire", action="store_true", help="encode, number and decode events as in production, even without loss"
    )
    _number(parser, "--prefill-rate", float, "tokens a second of one replica (default: the mocker's curve)")
    _number(parser, "--decode-step-ms", float, "one decode step of one replica (default: the mocker's curve)")
    parser.add_argument("--calibrate", metavar="URL", help="take both rates from the replicas of this running cluster")
    _number(parser, "--ttft-target", float, "also find how many replicas hold this mean, in seconds")
    parser.add_argument(
        "--autoscale",
        metavar="MIN:MAX",
        help="let the number of our replicas follow demand (target: --ttft-target, else 1 s), beside fixed numbers",
    )
    _number(parser, "--start-s", float, "seconds until a replica that is added serves (default: 30)")
    _number(parser, "--seed", int, "of all that is drawn (default: 0)")
    parser.add_argument("--json", metavar="FILE", help="write the results for programs")
    parser.add_argument("--plot", metavar="FILE", help="draw them: .png, .svg, or .html with nothing else needed")


def _number(parser: Parser, flag: str, kind: type, text: str) -> None:
    parser.add_argument(flag, type=kind, metavar=kind.__name__.upper(), help=text.replace("%", "%%"))


def _watch_arguments(parser: Parser) -> None:
    _url_argument(parser)
    _lookup_arguments(parser)
    _add_setting(parser, SETTINGS["events_curve_keys"])
    parser.add_argument("--replica", metavar="ID", action="append", help="follow only this replica; may be given again")
    parser.add_argument("--event", metavar="KIND", action="append", help="only events of this kind; may be given again")
    parser.add_argument("--hash", metavar="PREFIX", help="only blocks whose hash begins with these hex digits")
    parser.add_argument("--rates", metavar="S", type=float, help="print rates every S seconds instead of events")
    parser.add_argument(
        "--record",
        metavar="FILE",
        help="append every event of the replicas that are followed to this file, shown or not",
    )
    parser.add_argument("--replay", metavar="FILE", help="print a recorded file instead of following a cluster")
    parser.add_argument("--json", action="store_true", help="one JSON object per event, for programs")


def _explain_arguments(parser: Parser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="sent as one user message; --raw: as it is")
    parser.add_argument("--raw", action="store_true", help="no chat template: the prompt of a completion")
    parser.add_argument(
        SETTINGS["served_model_name"].flag,
        dest="asked_model",
        metavar="NAME",
        help="of the model, where there are several",
    )
    parser.add_argument("--body", metavar="FILE", help="JSON body of a chat or completion request, instead of a prompt")
    parser.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="with the key of whose request it is (-: standard input): tenants share no cached blocks",
    )
    _url_argument(parser)
    _lookup_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print what /explain answers, for programs")


def _stop_arguments(parser: Parser) -> None:
    _lookup_arguments(parser)
    parser.add_argument("--force", action="store_true", help="kill what does not end in time")


def _keys_arguments(parser: Parser) -> None:
    parser.add_argument("folder", metavar="DIR", help="where the keys are to be; the folder is made")
    parser.add_argument("--client", metavar="NAME", help="add keys for one more subscriber to a folder made before")


def _analyze_arguments(parser: Parser) -> None:
    parser.add_argument("log", metavar="LOG", help="OpenAI requests or a trace, as JSON lines; - is standard input")
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings")
    _add_setting(parser, SETTINGS["model"])
    # Not the setting of that name: traces have larger blocks than a cluster may have.
    size = "tokens per block (default: 512 for traces, else the setting)"
    parser.add_argument("--block-size", dest="block_tokens", metavar="N", help=size)
    for flag, metavar, text in (
        ("--tokenizer", "FOLDER", "tokenizer and chat template for requests (default: the model's)"),
        ("--format", "openai|mooncake", "format of the log (default: by its first line)"),
        ("--sizes", "N,N,...", "cache sizes in blocks to look at, such as 1k,4k,16k (default: powers of two)"),
        ("--bytes-per-block", "SIZE", "KV bytes of a block over all ranks (default: of the model that --model names)"),
        ("--kv-memory", "SIZE", "KV memory of a GPU, such as 45GB: tells how many GPUs are needed"),
        ("--prefill-rate", "TOKENS", "prompt tokens that a replica computes in a second: tells seconds saved"),
    ):
        parser.add_argument(flag, metavar=metavar, help=text)
    parser.add_argument("--replicas", dest="replica_counts", metavar="N,N,...", help="numbers of replicas (1,2,4,8)")
    parser.add_argument("--skip-malformed", action="store_true", help="count lines that cannot be read and go on")
    parser.add_argument("--no-snippets", action="store_true", help="show no text of the log in the advice")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument(
        "--plot", metavar="FILE", action="append", default=[], help="draw .png, .svg or .html; may be given again"
    )


def _add_setting(parser: Any, setting: Setting) -> None:
    default = "empty" if setting.default == "" else str(setting.default).replace("True", "on").replace("False", "off")
    text = f"{setting.description} (default: {default})".replace("%", "%%")
    if setting.bare_type is bool:
        parser.add_argument(
            *setting.flags, dest=setting.name, action=argparse.BooleanOptionalAction, default=None, help=text
        )
        return
    metavar = "|".join(setting.choices) if setting.choices else setting.bare_type.__name__.upper()
    action = JoinAction if setting.repeatable else None
    parser.add_argument(
        *setting.flags, dest=setting.name, metavar=metavar, help=text, **({"action": action} if action else {})
    )


COMMANDS = {
    "serve": Command("start replicas and router, and keep them running", _serve_arguments, _serve),
    "status": Command("show replicas, load and cache hits of a running cluster", _status_arguments, _status),
    "explain": Command("show where a prompt would go now, and why", _explain_arguments, _explain),
    "simulate": Command(
        "compare routing policies over modelled replicas, ours and others'", _simulate_arguments, _simulate
    ),
    "watch": Command("print the cache events of a running cluster", _watch_arguments, _watch),
    "scale": Command("change the number of replicas of a running cluster", _scale_arguments, _scale),
    "drain": Command("end one replica of a running cluster when it has finished what it has", _drain_arguments, _drain),
    "update": Command(
        "change model or settings of a running cluster, one replica after the other, with no failed request",
        _update_arguments,
        _update,
    ),
    "doctor": Command(
        "look for what would keep a cluster from starting or serving here, and say what to do about it",
        _doctor_arguments,
        _doctor,
    ),
    "stop": Command("end a running cluster", _stop_arguments, _stop),
    "keys": Command("make keys that encrypt what replicas, routers and subscribers exchange", _keys_arguments, _keys),
    "analyze": Command(
        "tell from a log of requests what prefix caching is worth, and how large the cache should be",
        _analyze_arguments,
        _analyze,
    ),
    "version": Command("print the version", lambda _: None, _version),
}

if __name__ == "__main__":
    sys.exit(main())
