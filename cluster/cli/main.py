"""The command line: words to a command, and errors to one line that helps. Help is there at once: it loads no command.

Exit codes: 0 done, 1 failed, 2 the command or its settings are wrong.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from cyclopts import App, Group
from cyclopts.exceptions import CycloptsError, UnknownCommandError, UnknownOptionError, UnusedCliTokensError

from ... import __version__
from ..errors import ClusterError, SettingsError
from ..output import console

if TYPE_CHECKING:
    from ..config import Settings
    from ..flags import Given

#: The commands by task, with their help. A new one is a row here, and a function of its name in the module of its name.
COMMANDS: dict[str, dict[str, str]] = {
    "Start and end": {
        "serve": "Start replicas and router, and keep them running.",
        "route": "Route to inference servers that run already (vLLM, SGLang), found by URL.",
        "stop": "End a running cluster.",
        "doctor": "Find what would keep a cluster from starting or serving here, with remedies.",
    },
    "Change a running cluster": {
        "scale": "Change the number of replicas of a running cluster.",
        "drain": "End one replica of a running cluster after its running requests.",
        "update": "Change model or settings of a running cluster, one replica at a time, with no failed request.",
    },
    "Observe": {
        "status": "Show replicas, load and cache hits of a running cluster.",
        "logs": "Print what replicas, routers and controller have logged, also after the end of the cluster.",
        "explain": "Show which replica a prompt would be sent to, and why.",
        "top": "Show what a running cluster does, live.",
        "watch": "Print the cache events of a running cluster.",
    },
    "Tools": {
        "simulate": "Compare routing policies on simulated replicas.",
        "analyze": "Estimate from a request log what prefix caching gains, and how large the cache should be.",
        "keys": "Create keys that encrypt what replicas, routers and subscribers exchange.",
        "version": "Print the version.",
    },
}
NAMES = [name for commands in COMMANDS.values() for name in commands]
#: The functions of commands that are elsewhere. Nothing that serves imports the offline tools.
ELSEWHERE = {
    "stop": "cli.daemon:stop",
    **{order: f"cli.control:{order}" for order in ("scale", "drain", "update")},
    **{tool: f"lab.{tool}.command:{tool}_command" for tool in ("simulate", "analyze")},
    "version": "cli.keys:version",
}
USAGE = {"scale": "Usage: homing scale [MODEL] N [OPTIONS]"}

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
    """A command with its arguments, not executed yet."""

    run: Callable[[], int | None]
    arguments: Mapping[str, Any]

    @property
    def given(self) -> "Given":
        given: Given = self.arguments.get("given", {})
        return given

    @property
    def settings(self) -> "Settings":
        from ..flags import settings_of

        return settings_of(self.given, self.arguments.get("model"))


def parse(words: Sequence[str], out: TextIO = sys.stdout) -> Invocation:
    """The command of these words; its output goes to `out`. Raises SettingsError."""
    app.help_formatter = "default" if out.isatty() else "plain"
    try:
        function, bound, injected = app.parse_args(words, console=console(out), exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise SettingsError(_message(error)) from error
    bound.arguments |= {name: value for name, value in (("out", out), ("words", words)) if name in injected}
    return Invocation(lambda: function(*bound.args, **bound.kwargs), bound.arguments)


def _message(error: CycloptsError) -> str:
    from ..config import nearest

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
            hint = f"; {ours}" if ours else nearest(word, [flag for flag in flags if flag.startswith("--")])
            return f"{where}unknown argument {word}{hint}"
        case UnusedCliTokensError(unused_tokens=[word, *_]):
            return f"{where}unknown argument {word} (see: {help_command})"
        case _:
            text = str(error).removeprefix(f'Command "{command}" parameter ').rstrip(".")
            return f"{where}{text} (see: {help_command})"


def run(words: Sequence[str], out: TextIO) -> int:
    """Run one command; returns the exit code. Raises ClusterError."""
    return parse(words, out).run() or 0


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


if __name__ == "__main__":
    sys.exit(main())
