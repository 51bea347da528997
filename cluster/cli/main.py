"""The command line. Flags of settings are derived from `config.SETTINGS`.

Exit codes: 0 done, 1 failed, 2 the command or its settings are wrong.
"""

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, TextIO, get_args

from ... import __version__
from ...kvcache.eviction import EvictionName
from ..config import ROOMS, SETTINGS, Setting, Settings, load_settings, nearest
from ..errors import ClusterError, SettingsError

#: Settings by which a command finds a running cluster.
LOOKUP = ("name", "state_dir")


#: What users of vLLM type, and what homing has in its place; the nearest spelling would often mean something else.
VLLM_FLAGS = {
    "--enable-chunked-prefill": "it is always on",
    "--enable-prefix-caching": "it is on (off: --no-prefix-caching)",
    "--no-enable-prefix-caching": "here --no-prefix-caching",
    **dict.fromkeys(("-tp", "--tp"), "here --tensor-parallel-size"),
    **dict.fromkeys(("-dp", "--data-parallel-size"), "here --replicas"),
    **dict.fromkeys(("-pp", "--pipeline-parallel-size"), "there is no pipeline parallelism: --tensor-parallel-size"),
    "--max-num-seqs": "here --max-running-requests",
    "--max-num-batched-tokens": "here --max-batched-tokens",
    "--num-gpu-blocks-override": "here --num-kv-blocks",
    "--kv-cache-memory-bytes": "here --kv-cache-bytes",
    "--prefix-caching-hash-algo": "here --hash-algorithm",
    "--kv-events-config": "events are published without it (off: --no-publish-events)",
    "--attention-config": "here --attention-backend",
    "--load-format": "weights are read from safetensors files",
    "--trust-remote-code": "code of a model's repository is never run",
    "--download-dir": "set HF_HOME",
    "--hf-token": "set HF_TOKEN",
    "--swap-space": "preempted requests are computed again",
    "--enforce-eager": "CUDA graphs need no flag",
    "--seed": "each request has a seed of its own",
    "--ssl-certfile": "here --tls-cert-file",
    "--ssl-keyfile": "here --tls-key-file",
    "--allowed-origins": "here --cors-origins",
    "--uvicorn-log-level": "here --log-level",
    "--enable-log-requests": "here --access-log",
    "--distributed-executor-backend": "replicas always run on Ray",
}


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises SettingsError."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{message} (see: {self.prog} --help)")

    def flags(self) -> list[str]:
        return [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]


class JoinAction(argparse.Action):
    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:  # noqa: ARG002
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, values if before is None else f"{before},{values}")


#: The names and the options of a call of `add_argument`.
Argument = tuple[tuple[str, ...], dict[str, Any]]


@dataclass(slots=True, frozen=True)
class Command:
    summary: str
    run: Callable[[argparse.Namespace, TextIO], int]  #: imports what it needs, so that the command line starts fast
    arguments: Sequence[Argument]
    all_settings: bool = False  #: accepts every setting as a flag


def build_parser() -> tuple[Parser, dict[str, Parser]]:
    parser = Parser(
        prog="homing",
        description="Serve a language model on many replicas, and send each request to the one that has its prefix in "
        "cache.",
        epilog="Settings are flags, HOMING_* variables and keys of the file given by --config: docs/settings.md.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"homing {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    built: dict[str, Parser] = {}
    for name, command in COMMANDS.items():
        description = command.summary.capitalize() + "."
        built[name] = commands.add_parser(name, help=command.summary, description=description, allow_abbrev=False)
        for names, options in command.arguments:
            built[name].add_argument(*names, **options)
        for room in ROOMS if command.all_settings else ():
            group = built[name].add_argument_group(f"{room} settings")
            for setting in SETTINGS.values():
                if setting.room == room:
                    names, options = _setting(setting)
                    group.add_argument(*names, **options)
    return parser, built


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The command, its arguments, and all words as given. Raises SettingsError; `--help` and `--version` exit."""
    parser, commands = build_parser()
    if words and not words[0].startswith("-") and words[0] not in commands:
        raise SettingsError(f"no command {words[0]!r}{nearest(words[0], commands)} (see: homing --help)")
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        known = commands[arguments.command].flags() if arguments.command else []
        word = unknown[0].partition("=")[0]
        where = f"{arguments.command}: " if arguments.command else ""
        serving = arguments.command in COMMANDS and COMMANDS[arguments.command].all_settings
        hint = f"; {VLLM_FLAGS[word]}" if serving and word in VLLM_FLAGS else nearest(word, known)
        raise SettingsError(f"{where}unknown argument {word}{hint}")
    arguments.words = words
    return arguments


def given_flags(arguments: argparse.Namespace) -> dict[str, str]:
    """Settings given as flags, or as the MODEL argument, as text by name."""
    flags = {name: str(value) for name, value in vars(arguments).items() if name in SETTINGS and value is not None}
    if model := getattr(arguments, "model_argument", None):
        if "model" in flags:
            raise SettingsError(f"the model is given twice: {model} and --model {flags['model']}")
        flags["model"] = model
    return flags


def settings_of(arguments: argparse.Namespace) -> Settings:
    file = getattr(arguments, "config", None)
    return load_settings(given_flags(arguments), file=Path(file) if file else None)


def run(words: Sequence[str], out: TextIO) -> int:
    """Run one command; returns the exit code. Raises ClusterError."""
    arguments = parse(words)
    if arguments.command is None:
        build_parser()[0].print_help(out)
        return 0
    return COMMANDS[arguments.command].run(arguments, out)


def main() -> int:
    try:
        return run(sys.argv[1:], sys.stdout)
    except ClusterError as error:
        print(f"homing: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # The reader of our output has gone (`homing watch | head`); flushing stdout at exit must not fail, too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def _calls(path: str) -> Callable[[argparse.Namespace, TextIO], int]:
    """Calls a function of this package, such as `status.status`, with the settings and the command's own arguments."""

    def call(arguments: argparse.Namespace, out: TextIO) -> int:
        module, _, name = path.partition(".")
        function = getattr(import_module(f".{module}", __package__), name)
        general = {*SETTINGS, "command", "config", "model_argument", "words"}
        own = {name: value for name, value in vars(arguments).items() if name not in general}
        code: int = function(settings_of(arguments), out, **own)
        return code

    return call


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


def _explain(arguments: argparse.Namespace, out: TextIO) -> int:
    from ..client import read_key
    from .explain import diff, explain, request_body

    # never on the command line, which everybody on the machine can read
    api_key = read_key(arguments.api_key_file or "", "--api-key-file", sys.stdin)
    where: dict[str, Any] = {"url": arguments.url, "api_key": api_key, "as_json": arguments.json}
    if arguments.diff:
        return diff(settings_of(arguments), out, arguments.diff, arguments.asked_model, **where)
    body = request_body(arguments.prompt, arguments.body, arguments.asked_model, raw=arguments.raw)
    return explain(settings_of(arguments), out, body, **where)


def _simulate(arguments: argparse.Namespace, out: TextIO) -> int:
    from ..lab.simulate.command import order_of, simulate

    # The other flags, such as --replicas, belong to the simulated cluster.
    settings = settings_of(argparse.Namespace(model=arguments.model, config=arguments.config))
    return simulate(order_of(vars(arguments)), settings, out, sys.stderr)


def _watch(arguments: argparse.Namespace, out: TextIO) -> int:
    from .watch import EventFilter, WatchOptions, replay, watch

    if arguments.rates is not None and not 0 < arguments.rates < math.inf:
        raise SettingsError(f"--rates {arguments.rates:g}: give seconds above 0")
    options = WatchOptions(
        shown=EventFilter.of(arguments.replica or (), arguments.event or (), arguments.hash or ""),
        as_json=arguments.json,
        rates_s=arguments.rates,
        record=Path(arguments.record) if arguments.record else None,
    )
    if arguments.replay:
        return replay(Path(arguments.replay), out, options)
    return watch(settings_of(arguments), out, options, url=arguments.url)


def _update(arguments: argparse.Namespace, out: TextIO) -> int:
    from .control import update

    flags = {name: value for name, value in given_flags(arguments).items() if name not in LOOKUP}
    file = Path(arguments.config) if arguments.config else None
    changes = {"flags": flags, "file": file, "remove": arguments.remove, "restart": arguments.restart}
    # The command's other settings and its file are changes.
    found = settings_of(argparse.Namespace(**{name: getattr(arguments, name) for name in LOOKUP}))
    return update(found, out, wait=arguments.wait, **changes)


def _keys(arguments: argparse.Namespace, out: TextIO) -> int:
    from ...events.errors import BadKeys
    from ...events.security.curve_keys import add_client, make_folder

    folder = Path(arguments.folder)
    try:
        if arguments.client is None:
            make_folder(folder)
            print(f"keys are in {folder}; start replicas with: homing serve --events-curve-keys {folder}", file=out)
            return 0
        made = add_client(folder, arguments.client)
    except BadKeys as error:
        raise SettingsError(str(error)) from error
    print(f"move {made} to the client, which loads it with homing.events.load_pair", file=out)
    print(f"replicas accept it from now on; to revoke it: rm {folder / 'clients' / made.stem}.key", file=out)
    return 0


def _analyze(arguments: argparse.Namespace, out: TextIO) -> int:
    from ..lab.analyze.command import analyze, options_of

    return analyze(options_of(arguments), settings_of(arguments), out)


def _version(_: argparse.Namespace, out: TextIO) -> int:
    print(f"homing {__version__}", file=out)
    return 0


def _argument(name: str, metavar: str | type | None, text: str, **options: Any) -> Argument:
    """`metavar`: a type is also that of the value; None: a switch."""
    if metavar is None:
        options = {"action": "store_true", **options}
    elif isinstance(metavar, str):
        options["metavar"] = metavar
    else:
        options |= {"type": metavar, "metavar": metavar.__name__.upper()}
    return (name,), {"help": text.replace("%", "%%"), **options}


def _setting(setting: Setting) -> Argument:
    default = "empty" if setting.default == "" else str(setting.default).replace("True", "on").replace("False", "off")
    help_text = f"{setting.meta.description} (default: {default})".replace("%", "%%")
    options: dict[str, Any] = {"dest": setting.name, "help": help_text}
    if setting.bare_type is bool:
        options |= {"action": argparse.BooleanOptionalAction, "default": None}
    else:
        options["metavar"] = "|".join(setting.choices) if setting.choices else setting.bare_type.__name__.upper()
    if (setting.meta.extra or {}).get("repeatable"):
        options["action"] = JoinAction
    return setting.flags, options


def _count(word: str) -> int:
    if not word.isdigit():
        raise argparse.ArgumentTypeError(f"{word!r} is not a number of replicas")
    return int(word)


CONFIG = _argument("--config", "FILE", "YAML file of settings")
URL = _argument("--url", "URL", "address of a cluster (default: the one that runs here)")
NO_WAIT = _argument("--no-wait", None, "return at once", dest="wait", action="store_false")
FIND_CLUSTER = (
    _argument("--config", "FILE", "YAML file of settings that the cluster was started with"),
    *(_setting(SETTINGS[name]) for name in LOOKUP),
)
SERVE = (
    _argument(
        "model_argument",
        "MODEL",
        "Hugging Face name or local folder (default: the demo model that ships with the package)",
        nargs="?",
    ),
    _argument("--config", "FILE", "YAML file of settings, with one section per package"),
    _argument("--detach", None, "run in the background; return when it is ready"),
    (("--background",), {"action": "store_true", "help": argparse.SUPPRESS}),
)
STATUS = (URL, *FIND_CLUSTER, _argument("--json", None, "print the response of /cluster, for programs", dest="as_json"))
CHOOSE_MODEL = _argument(
    SETTINGS["served_model_name"].flag, "NAME", "name of the model, if several are served", dest="asked_model"
)
EXPLAIN = (
    _argument("prompt", "PROMPT", "sent as one user message; with --raw without a chat template", nargs="?"),
    _argument("--raw", None, "no chat template: the prompt of a completion"),
    CHOOSE_MODEL,
    _argument("--body", "FILE", "JSON body of a chat or completion request, instead of a prompt"),
    _argument("--diff", "FILE", "two such files: where their prompts begin to differ", nargs=2),
    _argument(
        "--api-key-file", "FILE", "file with the tenant's API key (-: standard input); tenants share no cached blocks"
    ),
    URL,
    *FIND_CLUSTER,
    _argument("--json", None, "print the response of /explain, for programs"),
)
SIMULATE = (
    _argument(
        "trace",
        "LOG",
        "OpenAI requests or a Mooncake trace, as JSON lines (default: conversations are generated)",
        nargs="?",
        type=Path,
    ),
    CONFIG,
    _setting(SETTINGS["model"]),
    _setting(SETTINGS["tokenizer"]),
    _argument("--output-tokens", int, "of each response, for logs of requests (default: 200)"),
    _argument("--scenario", "NAME", "a prepared scenario instead: see docs/simulate.md"),
    _argument(
        "--policies",
        "NAMES",
        f"separated by commas, of: {', '.join(SETTINGS['policy'].choices or ())}, oracle "
        "(default: ours and the best of the others)",
        type=lambda words: tuple(word.strip() for word in words.split(",")),
    ),
    _argument("--replicas", int, "simulated replicas (default: 8)"),
    _argument("--routers", int, "routers, which share no state (default: 1)"),
    _argument("--cache-blocks", int, "KV blocks of one replica (default: 4096)"),
    _argument("--block-tokens", int, "tokens per block (default: 512 for traces, else the setting)"),
    (("--eviction",), {"choices": get_args(EvictionName), "help": "eviction policy (default: lru)"}),
    _argument("--load", float, "share of the replicas' best throughput; sets the speed"),
    _argument("--speed", float, "speed-up of the recorded times (default: 1)"),
    _argument("--rate", float, "without a LOG: requests per second of the generated conversations (default: 4)"),
    _argument("--requests", int, "use only this many requests, from the start"),
    _argument("--rounds", int, "repeat the trace this many times, each time with new blocks (default: 1)"),
    _argument("--event-delay-ms", float, "from a replica's step until routers know of it (default: 5)"),
    _argument("--event-loss", float, "share of published messages that a router loses (default: 0)"),
    _argument("--resync-ms", float, "a replica's answer to a router that lost messages (default: 20)"),
    _argument("--wire", None, "encode, number and decode events as in production, even without loss"),
    _argument("--prefill-rate", float, "tokens per second of one replica (default: the mocker's curve)"),
    _argument("--decode-step-ms", float, "one decode step of one replica (default: the mocker's curve)"),
    _argument("--calibrate", "URL", "take both rates from the replicas of this running cluster"),
    _argument("--ttft-target", float, "also find the number of replicas that reaches this mean, in seconds"),
    _argument(
        "--autoscale",
        "MIN:MAX",
        "also let the number of homing's replicas follow the load (target: --ttft-target, else 1 s)",
    ),
    _argument("--start-s", float, "time until an added replica serves, in seconds (default: 30)"),
    _argument("--seed", int, "of all random numbers (default: 0)"),
    _argument("--json", "FILE", "write the results as JSON, for programs", type=Path),
    _argument("--plot", "FILE", "draw the results: .png, .svg, or self-contained .html", type=Path),
)
WATCH = (
    URL,
    *FIND_CLUSTER,
    _setting(SETTINGS["events_curve_keys"]),
    _argument("--replica", "ID", "follow only this replica; may be repeated", action="append"),
    _argument("--event", "KIND", "only events of this kind; may be repeated", action="append"),
    _argument("--hash", "PREFIX", "only blocks whose hash begins with these hex digits"),
    _argument("--rates", "S", "print rates every S seconds instead of events", type=float),
    _argument("--record", "FILE", "append every event of the followed replicas to this file, shown or not"),
    _argument("--replay", "FILE", "print a recorded file instead of following a cluster"),
    _argument("--json", None, "print one JSON object per event, for programs"),
)
UPDATE = (
    _argument("model_argument", "MODEL", "another model, or another version of it", nargs="?"),
    _argument(
        "--config", "FILE", "YAML file of changes: settings that it does not name stay the same, new models are started"
    ),
    _argument("--remove", "NAME", "stop serving this model; may be repeated", action="append", default=[]),
    _argument("--restart", None, "replace every replica even if nothing changes"),
    NO_WAIT,
)
ANALYZE = (
    _argument("log", "LOG", "OpenAI requests or a trace, as JSON lines; -: standard input"),
    CONFIG,
    _setting(SETTINGS["model"]),
    # Not the setting of that name: traces have larger blocks than a cluster may have.
    _argument("--block-size", "N", "tokens per block (default: 512 for traces, else the setting)", dest="block_tokens"),
    _setting(SETTINGS["tokenizer"]),
    _argument("--format", "openai|mooncake", "format of the log (default: detected from its first line)"),
    _argument("--sizes", "N,N,...", "cache sizes in blocks, such as 1k,4k,16k (default: powers of two)"),
    _argument("--bytes-per-block", "SIZE", "KV bytes of a block over all ranks (default: those of --model)"),
    _argument("--kv-memory", "SIZE", "KV memory of a GPU, such as 45GB: prints how many GPUs are needed"),
    _argument("--prefill-rate", "TOKENS", "prompt tokens that a replica computes per second: prints the seconds saved"),
    _argument("--replicas", "N,N,...", "numbers of replicas (default: 1,2,4,8)", dest="replica_counts"),
    _argument("--skip-malformed", None, "skip and count malformed lines"),
    _argument("--no-snippets", None, "print no text of the log in the advice"),
    _argument("--json", None, "print JSON, for programs"),
    _argument("--plot", "FILE", "draw .png, .svg or .html; may be repeated", action="append", default=[]),
)
COMMANDS = {
    "serve": Command("start replicas and router, and keep them running", _serve, SERVE, all_settings=True),
    "status": Command("show replicas, load and cache hits of a running cluster", _calls("status.status"), STATUS),
    "explain": Command("show which replica a prompt would be sent to, and why", _explain, EXPLAIN),
    "simulate": Command("compare routing policies on simulated replicas", _simulate, SIMULATE),
    "watch": Command("print the cache events of a running cluster", _watch, WATCH),
    "scale": Command(
        "change the number of replicas of a running cluster",
        _calls("control.scale"),
        (
            _argument("model_name", "MODEL", "the same as --served-model-name", nargs="?"),
            _argument("wanted", "N", "number of replicas", type=_count),
            CHOOSE_MODEL,
            NO_WAIT,
            *FIND_CLUSTER,
        ),
    ),
    "drain": Command(
        "end one replica of a running cluster after its running requests",
        _calls("control.drain"),
        (
            _argument("replica_id", "REPLICA", "name of the replica, such as r0"),
            _argument("--replace", None, "start another replica in its place first"),
            NO_WAIT,
            *FIND_CLUSTER,
        ),
    ),
    "update": Command(
        "change model or settings of a running cluster, one replica at a time, with no failed request",
        _update,
        UPDATE,
        all_settings=True,
    ),
    "doctor": Command(
        "find what would keep a cluster from starting or serving here, with remedies",
        _calls("doctor.doctor"),
        (
            _argument("model_argument", "MODEL", "the model to be served", nargs="?"),
            CONFIG,
            _argument("--json", None, "print a list of findings, for programs", dest="as_json"),
        ),
        all_settings=True,
    ),
    "stop": Command(
        "end a running cluster",
        _calls("daemon.stop"),
        (*FIND_CLUSTER, _argument("--force", None, "kill it at once, without an orderly end")),
    ),
    "logs": Command(
        "print what replicas, routers and controller have logged, also after the end of the cluster",
        _calls("logs.logs"),
        (
            _argument("part", "PART", "a replica such as r0, router or controller (default: all)", nargs="?"),
            *FIND_CLUSTER,
            _argument("--lines", int, "print only the last N; 0: all that is kept (default: 200)", default=200),
            (("-f", "--follow"), {"action": "store_true", "help": "also print what is added, until interrupted"}),
        ),
    ),
    "keys": Command(
        "create keys that encrypt what replicas, routers and subscribers exchange",
        _keys,
        (
            _argument("folder", "DIR", "folder for the keys, which is created"),
            _argument("--client", "NAME", "add keys for one more subscriber to an existing folder"),
        ),
    ),
    "analyze": Command(
        "estimate from a request log what prefix caching gains, and how large the cache should be", _analyze, ANALYZE
    ),
    "version": Command("print the version", _version, ()),
}

if __name__ == "__main__":
    sys.exit(main())
