"""Measure HTTP alone in a Python process: the same small answer by our server, by h11, by uvicorn and by granian.

    python tests/bench/http_layers.py [--peers FOLDER] [--rounds N] [--requests N]

`--peers FOLDER` is a virtual environment with `uvicorn` (and httptools, uvloop), `granian` and `h11`; missing ones are
left out. Each server in turn answers a chat of 100 bytes with 400 bytes over 32 kept-alive connections; CPU is the
server process's own. There is no router behind any of them.
"""

import argparse
import asyncio
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.bench.front import Subject, chat, cpu_s, free_port, run_load, started, wait_for
from tests.bench.front_client import Load
from tests.bench.http_layers_peer import ANSWER

HERE = Path(__file__).resolve().parent


def serve_ours(port: int) -> None:
    """Our connection, with a handler that answers at once."""
    import uvloop

    from homing.router.config import RouterSettings
    from homing.router.http.protocol.connection import HttpConnection
    from homing.router.http.protocol.exchange import Exchange, Request
    from homing.router.http.protocol.server import HttpServer

    class Handler:
        """Gives every request the same answer."""

        def serve(self, request: Request, wire: HttpConnection) -> Exchange:
            exchange = Exchange(request, wire, "id", 0.0, lambda _: None)
            exchange.respond(ANSWER)
            return exchange

        def admit(self, path: str, headers: object) -> None:
            pass

        def headers_for(self, request: Request) -> tuple[()]:
            return ()

        refuse = cut = None

    async def main() -> None:
        await HttpServer(Handler(), RouterSettings(), clock=time.monotonic).start("127.0.0.1", port)  # type: ignore[arg-type]
        await asyncio.Event().wait()

    uvloop.run(main())


def command(name: str, port: int, peers: Path | None) -> list[str] | None:
    """The command that starts a server; None when it is not installed."""
    if name == "ours":
        return [sys.executable, str(Path(__file__).resolve()), "--serve", str(port)]
    if peers is None or not list(peers.glob(f"lib/*/site-packages/{name}")):
        return None
    python, where = str(peers / "bin" / "python"), ["--port", str(port)]
    if name == "h11":
        return [python, str(HERE / "http_layers_peer.py"), str(port)]
    asgi = [python, "-m", name, "http_layers_peer:app", *where, "--loop", "uvloop"]
    if name == "uvicorn":
        return [*asgi, "--http", "httptools", "--no-access-log", "--log-level", "warning"]
    return [*asgi, "--interface", "asgi", "--no-log"]


def main() -> None:
    """Start all servers, measure them in turn and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=5000)
    options = parser.parse_args()
    if options.serve:
        serve_ours(options.serve)
        return
    load = Load(path="/v1/chat/completions", bodies=[chat("hi", 16)], connections=32, requests=options.requests)
    servers: dict[str, tuple[int, Subject, list[float]]] = {}
    with ExitStack() as stack:
        for name in ("ours", "h11", "uvicorn", "granian"):
            port = free_port()
            if (started_by := command(name, port, options.peers)) is None:
                print(f"{name}: not installed", file=sys.stderr)
                continue
            process = stack.enter_context(started(*started_by, quiet=False, folder=HERE))
            wait_for(f"http://127.0.0.1:{port}/")
            servers[name] = port, Subject(name, port, [process], {}), []
        for _ in range(options.rounds + 1):
            for port, server, costs in servers.values():
                before = cpu_s(server)
                run_load(port, load)
                costs.append((cpu_s(server) - before) / options.requests * 1e6)
    for name, (_, _, costs) in servers.items():
        print(f"{name:10} {median(costs[1:]):6.1f} us CPU a request")


if __name__ == "__main__":
    main()
