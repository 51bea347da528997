"""Finds out an external engine's kind, version, model, limits, block size, ranks and event sockets.

The result of `discover` also tells what was not found. vLLM (from 0.33 on; before, in its development mode) and SGLang
report over HTTP where they publish events; for others the usual ports are tried.
"""

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import zmq
import zmq.asyncio
from msgspec import Meta
from zmq.utils.monitor import parse_monitor_message

from ....events.endpoint import needs_ipv6
from ...errors import BackendsInvalid
from .addresses import ReplicaAddress, check_endpoint
from .http_client import Address, Client, EngineUnreachableError
from .load import MAX_COUNT, MAX_RANKS, EngineMetrics, metric_ranks, read_metrics
from .probe import Card, read_cards

#: Ports in vLLM's and SGLang's documentation. Data-parallel ranks add their number.
EVENTS_PORT = 5557
REPLAY_PORT = 5558
ENDPOINT_TIMEOUT_S = 1.0
#: For questions that an engine need not answer: one that is slow counts as not answered.
OPTIONAL_TIMEOUT_S = 5.0
MAX_VERSION_CHARS = 64
#: Small, as no message of a probed socket is read.
MAX_FRAME_BYTES = 1024


class EngineAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A listed engine: its server's URL and, unless they are to be discovered, its event sockets."""

    url: str
    events: str = ""
    replay: str = ""

    def check(self) -> "EngineAddress":
        """Return a copy with the URL normalized. Raises BackendsInvalid."""
        for name, endpoint in (("events", self.events), ("replay", self.replay)):
            check_endpoint(name, endpoint)
        return msgspec.structs.replace(self, url=Address.of(self.url).url)


@dataclass(slots=True, frozen=True, kw_only=True)
class EngineInfo:
    """An engine that answered. Empty or None: not reported."""

    address: EngineAddress
    kind: str
    version: str
    cards: tuple[Card, ...]
    model_path: str
    block_size: int | None
    ranks: tuple[int, ...]  #: data-parallel ranks; empty: a single one
    events: str  #: event address of rank 0
    replay: str  #: replay address of rank 0
    #: by rank: event and replay addresses, where the engine names each; for other ranks, the rank is added to the port
    sources: Mapping[int, tuple[str, str]] = field(default_factory=dict)

    def replica_addresses(self, name: str) -> list[ReplicaAddress]:
        """The engine's replicas as the router sees them: one per rank, as each rank has its own cache."""
        address = Address.of(self.address.url)
        if not self.ranks:
            return [ReplicaAddress(name, address, self.events, self.replay)]
        return [ReplicaAddress(f"{name}.{rank}", address, *self._sockets(rank), rank) for rank in self.ranks]

    def _sockets(self, rank: int) -> tuple[str, str]:
        return self.sources.get(rank) or (of_rank(self.events, rank), of_rank(self.replay, rank))

    def summary(self) -> str:
        card = self.cards[0] if self.cards else Card("no model")
        parts = [
            f"{self.kind or 'unknown engine'} {self.version}".strip(),
            f"model {card.id}" + (f" ({card.max_model_len} tokens)" if card.max_model_len else ""),
            f"blocks of {self.block_size}" if self.block_size else "",
            f"{len(self.ranks)} ranks" if self.ranks else "",
            f"events {self.events}" if self.events else "no events",
            f"replay {self.replay}" if self.replay else "",
        ]
        return " · ".join(filter(None, parts))

    def missing(self) -> Iterator[str]:
        """What was not found, and what to do about it."""
        if not self.kind:
            yield "kind and version: /version and /server_info do not answer"
        if not self.block_size:
            yield "block size: /metrics does not report it; set --block-size"
        if not self.events:
            yield f"events: routing by load and by what was sent there (approximate). Start it with {EVENT_FLAGS}"
        elif not self.replay:
            yield f"replay: lost and earlier events remain unknown. Start it with {EVENT_FLAGS}"


#: The same for vLLM and SGLang.
EVENT_FLAGS = (
    '--kv-events-config \'{"enable_kv_cache_events": true, "publisher": "zmq", '
    f'"endpoint": "tcp://*:{EVENTS_PORT}", "replay_endpoint": "tcp://*:{REPLAY_PORT}"}}\''
)


def of_rank(endpoint: str, rank: int) -> str:
    """A rank's address, given that of rank 0: vLLM and SGLang add the rank to the port."""
    head, colon, port = endpoint.rpartition(":")
    return f"{head}{colon}{int(port) + rank}" if port.isdigit() else endpoint


async def discover(client: Client, address: EngineAddress, *, try_ports: bool) -> EngineInfo:
    """Query an engine over HTTP. Raises EngineUnreachableError.

    `try_ports`: look for event sockets at the usual ports of its host. Do not set it if several engines share a host:
    another engine's events could be mistaken for this one's.
    """
    cards = await read_cards(client)
    if cards is None:
        raise EngineUnreachableError(f"{client.address.url}/v1/models cannot be read")
    server, sources, version, text = await asyncio.gather(
        server_info(client), _event_sources(client), _json(client, "/version"), _text(client, "/metrics")
    )
    metrics = read_metrics(text)
    kind = "vllm" if "vllm:" in text else "sglang" if "sglang:" in text or "dp_size" in server else ""
    ranks = metric_ranks(text) or _rank_numbers(server.get("dp_size"))
    if len(sources) > len(ranks):
        ranks = tuple(sorted(sources))
    if address.events or address.replay:  # the operator knows better
        sources = {}
    first = sources.get(ranks[0] if ranks else 0)
    reported = first or _event_sockets(server, client.address.host)
    probed = await _default_ports(client.address.host, len(ranks) or 1) if try_ports and not any(reported) else ("", "")
    return EngineInfo(
        address=address,
        kind=kind,
        version=str(version.get("version") or server.get("version") or "")[:MAX_VERSION_CHARS],
        cards=tuple(cards),
        model_path=str(server.get("tokenizer_path") or server.get("model_path") or ""),
        block_size=_block_size(metrics, server),
        ranks=ranks if len(ranks) > 1 else (),
        events=address.events or reported[0] or probed[0],
        replay=address.replay or reported[1] or probed[1],
        sources=sources,
    )


def _block_size(metrics: EngineMetrics, server: Mapping[str, Any]) -> int | None:
    size = server.get("page_size")
    return metrics.block_size or (size if isinstance(size, int) and 0 < size <= MAX_COUNT else None)


def _rank_numbers(count: object) -> tuple[int, ...]:
    return tuple(range(count)) if isinstance(count, int) and count <= MAX_RANKS else ()


async def server_info(client: Client) -> Mapping[str, Any]:
    """What the engine says about its configuration; empty if it says nothing."""
    return await _json(client, "/server_info?config_format=json") or await _json(client, "/get_server_info")


async def _event_sources(client: Client) -> dict[int, tuple[str, str]]:
    """By data-parallel rank, the event and replay addresses that vLLM names, with the ports that it really uses."""
    try:
        listed = msgspec.json.decode(await _text(client, "/kv_event_sources") or "[]", type=list[_Source])
    except (msgspec.DecodeError, RecursionError):
        return {}
    host = client.address.host
    found = {each.data_parallel_rank or 0: each for each in listed[:MAX_RANKS]}
    sockets = {
        rank: (reachable(each.endpoint, host), reachable(each.replay_endpoint, host)) for rank, each in found.items()
    }
    return {rank: both for rank, both in sockets.items() if both[0]}


class _Source(msgspec.Struct, frozen=True):
    """One element of vLLM's `/kv_event_sources`."""

    endpoint: str
    replay_endpoint: str | None = None
    data_parallel_rank: Annotated[int, Meta(ge=0, lt=MAX_RANKS)] | None = None


def _event_sockets(server: Mapping[str, Any], host: str) -> tuple[str, str]:
    """The event and replay addresses in the engine's configuration; empty where it names none."""
    config = server.get("kv_events_config")
    inner = server.get("vllm_config")
    if config is None and isinstance(inner, dict):
        config = inner.get("kv_events_config")
    if isinstance(config, str):
        try:
            config = msgspec.json.decode(config)
        except (msgspec.DecodeError, RecursionError):
            config = None
    if not isinstance(config, dict) or config.get("enable_kv_cache_events") is False:
        return "", ""
    return reachable(config.get("endpoint"), host), reachable(config.get("replay_endpoint"), host)


def reachable(endpoint: object, host: str) -> str:
    """Turn the address that an engine binds into one to connect to; empty if it is not a usable address."""
    if not isinstance(endpoint, str):
        return ""
    shown = f"[{host}]" if ":" in host else host
    for anywhere in ("*", "0.0.0.0", "[::]"):
        endpoint = endpoint.replace(f"tcp://{anywhere}:", f"tcp://{shown}:")
    try:
        check_endpoint("events", endpoint)
    except BackendsInvalid:
        return ""
    return endpoint


async def _default_ports(host: str, ranks: int) -> tuple[str, str]:
    shown = f"[{host}]" if ":" in host else host
    events = f"tcp://{shown}:{EVENTS_PORT}"
    if not await _accepts(events, zmq.SUB):
        return "", ""
    # With several ranks, the port after rank 0's is the event port of rank 1.
    replay = f"tcp://{shown}:{REPLAY_PORT if ranks == 1 else EVENTS_PORT + ranks}"
    return events, replay if await _accepts(replay, zmq.DEALER) else ""


async def _accepts(endpoint: str, kind: int) -> bool:
    """Whether a ZeroMQ socket compatible with this type answers there. The handshake tells the peer's type."""
    context = zmq.asyncio.Context()
    socket = context.socket(kind)
    try:
        socket.maxmsgsize = MAX_FRAME_BYTES
        socket.ipv6 = await needs_ipv6(endpoint)
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_DISCONNECTED
        monitor = socket.get_monitor_socket(events | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
        socket.connect(endpoint)
        if not await monitor.poll(ENDPOINT_TIMEOUT_S * 1000):
            return False
        return bool(parse_monitor_message(await monitor.recv_multipart())["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED)
    finally:
        socket.disable_monitor()
        context.destroy(linger=0)


async def _text(client: Client, path: str) -> str:
    """The answer; empty if there is none, or not in time."""
    try:
        answer = await client.ask("GET", path, timeout_s=OPTIONAL_TIMEOUT_S)
    except EngineUnreachableError:
        return ""
    return answer.body.decode(errors="replace") if answer.status == 200 else ""


async def _json(client: Client, path: str) -> dict[str, Any]:
    """The answer's JSON object; empty if the path does not exist or returns something else."""
    try:
        content = msgspec.json.decode(await _text(client, path) or "{}")
    except (msgspec.DecodeError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
