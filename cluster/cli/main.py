"""The command line: parses words into a command and reports errors in one line. Help is fast: it loads no command.

Exit codes: 0 success, 1 failure, 2 the command or its settings are wrong.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from cyclopts import App, Group
from cyclopts.exceptions import CycloptsError, UnknownCommandError, UnknownOptionError, UnusedCliTokensError

from ... import __version__
from ..errors import ClusterError, ExtraMissing, SettingsError
from ..output import console

if TYPE_CHECKING:
    from ..config import Settings
    from ..flags import FlagValues

#: The commands by task, with their help. To add one, add a row here, and a function to the module of the same name.
COMMANDS: dict[str, dict[str, str]] = {
    "Start and end": {
        "serve": "Start replicas and router, and keep them running.",
        "route": "Route to inference servers that run already (vLLM, SGLang), found by URL.",
        "stop": "End a running cluster.",
        "doctor": "Find what would keep a cluster from starting or serving here, with remedies.",
    },
    "Change a running cluster": {
        "scale": "Change the number of replicas of a running cluster.",
        "drain": "Let one replica of a running cluster finish its requests, then end it.",
        "update": "Change the model or settings of a running cluster, one replica at a time, with no failed request.",
    },
    "Observe": {
        "status": "Show replicas, load and cache hits of a running cluster.",
        "logs": "Print the logs of replicas, routers and controller, even after the cluster has ended.",
        "explain": "Show which replica a prompt would be sent to, and why.",
        "requests": "List requests: running, slow, refused or failed ones; end one.",
        "top": "Show live what a running cluster is doing.",
        "watch": "Print the cache events of a running cluster.",
    },
    "Tools": {
        "simulate": "Compare routing policies on simulated replicas.",
        "analyze": "Estimate from a request log what prefix caching gains and how large the cache should be.",
        "keys": "Create keys that encrypt traffic between replicas, routers and subscribers.",
        "version": "Print the version.",
    },
}
NAMES = [name for commands in COMMANDS.values() for name in commands]
#: Where to find commands whose module has another name. The offline tools are imported only by their commands.
ELSEWHERE = {
    "stop": "cli.daemon:stop",
    **{order: f"cli.control:{order}" for order in ("scale", "drain", "update")},
    **{tool: f"lab.{tool}.command:{tool}_command" for tool in ("simulate", "analyze")},
    "version": "cli.keys:version",
}
USAGE = {"scale": "Usage: homing scale [MODEL] N [OPTIONS]"}

#: Flags of vLLM and their counterparts in homing; the nearest spelling would often be a flag with another meaning.
VLLM_FLAGS = {
    "--enable-chunked-prefill": "it is always on",
    "--enable-prefix-caching": "it is on by default (off: --no-prefix-caching)",
    "--no-enable-prefix-caching": "use --no-prefix-caching",
    **dict.fromkeys(("-tp", "--tp"), "use --tensor-parallel-size"),
    **dict.fromkeys(("-dp", "--data-parallel-size"), "use --replicas"),
    **dict.fromkeys(("-pp", "--pipeline-parallel-size"), "not supported: use --tensor-parallel-size"),
    "--max-num-seqs": "use --max-running-requests",
    "--max-num-batched-tokens": "use --max-batched-tokens",
    "--num-gpu-blocks-override": "use --num-kv-blocks",
    "--kv-cache-memory-bytes": "use --kv-cache-bytes",
    "--prefix-caching-hash-algo": "use --hash-algorithm",
    "--kv-events-config": "events are published by default (off: --no-publish-events)",
    "--attention-config": "use --attention-backend",
    "--load-format": "weights are always read from safetensors files",
    "--trust-remote-code": "code from a model's repository is never run",
    "--download-dir": "set HF_HOME",
    "--hf-token": "set HF_TOKEN",
    "--swap-space": "preempted requests are recomputed, not swapped",
    "--enforce-eager": "CUDA graphs need no flag",
    "--seed": "set `seed` in each request",
    "--ssl-certfile": "use --tls-cert-file",
    "--ssl-keyfile": "use --tls-key-file",
    "--allowed-origins": "use --cors-origins",
    "--uvicorn-log-level": "use --log-level",
    "--enable-log-requests": "use --access-log",
    "--distributed-executor-backend": "replicas always run on Ray",
}

app = App(
    name="homing",
    version=f"homing {__version__}",
    help="Serve a language model on many replicas, and send each request to the one that has its prefix in cache.",
    help_epilogue="Settings are flags, HOMING_* variables and keys of the file given by --config: docs/settings.md.",
    help_format="plaintext",
)
for title, commands in COMMANDS.items():
    group = Group.create_ordered(title)
    for name, text in commands.items():
        path = "homing.cluster." + ELSEWHERE.get(name, f"cli.{name}:{name}")
        app.command(path, name=name, group=group, help=text, usage=USAGE.get(name), sort_key=NAMES.index(name))
app.register_install_completion_command(group=group, help="Install shell completion of homing.")


@dataclass(slots=True, frozen=True)
class Invocation:
    """A parsed command with its arguments, ready to run."""

    run: Callable[[], int | None]
    arguments: Mapping[str, Any]

    @property
    def flags(self) -> "FlagValues":
        flags: FlagValues = self.arguments.get("flags", {})
        return flags

    @property
    def settings(self) -> "Settings":
        from ..flags import settings_of

        return settings_of(self.flags, self.arguments.get("model"))


def parse(words: Sequence[str], out: TextIO = sys.stdout) -> Invocation:
    """Parse words into a command whose output goes to `out`. Raises SettingsError."""
    app.help_formatter = "default" if out.isatty() else "plain"
    try:
        function, bound, injected = app.parse_args(words, console=console(out), exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise SettingsError(_message(error)) from error
    bound.arguments |= {name: value for name, value in (("out", out), ("words", words)) if name in injected}
    return Invocation(lambda: function(*bound.args, **bound.kwargs), bound.arguments)


def _message(error: CycloptsError) -> str:
    from ..config import nearest, removed

    command = " ".join(error.command_chain or ())
    where, help_command = (f"{command}: ", f"homing {command} --help") if command else ("", "homing --help")
    match error:
        case UnknownCommandError(unused_tokens=[word, *_]) if not word.startswith("-"):
            return f"no command {word!r}{nearest(word, NAMES)} (see: {help_command})"
        case UnknownCommandError(unused_tokens=[word, *_]):
            return f"unknown argument {word}{nearest(word, ('--help', '--version'))} (see: {help_command})"
        case UnknownOptionError():
            word = (error.token.keyword or error.token.value).partition("=")[0]
            flags = [name for argument in error.argument_collection for name in argument.names]
            ours = VLLM_FLAGS.get(word) if "--block-size" in flags else None
            hint = f"; {ours}" if ours else removed(word) if "--block-size" in flags else ""
            hint = hint or nearest(word, [flag for flag in flags if flag.startswith("--")])
            return f"{where}unknown argument {word}{hint}"
        case UnusedCliTokensError(unused_tokens=[word, *_]):
            return f"{where}unknown argument {word} (see: {help_command})"
        case _:
            text = str(error).removeprefix(f'Command "{command}" parameter ').rstrip(".")
            return f"{where}{text} (see: {help_command})"


def run(words: Sequence[str], out: TextIO) -> int:
    """Run one command; returns the exit code. Raises ClusterError."""
    try:
        return parse(words, out).run() or 0
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("numba", "ray", "torch"):
            raise
        raise ExtraMissing from error


def main() -> int:
    try:
        return run(sys.argv[1:], sys.stdout)
    except ClusterError as error:
        print(f"homing: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # The reader of our output has exited (`homing watch | head`). Flushing stdout at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
