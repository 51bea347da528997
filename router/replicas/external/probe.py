"""Decides whether an engine may join: it must serve the right model with the router's tokenization and block size.

`examine` is the pure decision; `probe` queries the engine. A difference is an error that names the field; otherwise it
would show only as wrong answers or a hit rate of zero. Values that an engine does not report are accepted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from ....replica.messages import ReplicaDescription, TokenId
from ...errors import ParityMismatch
from .http_client import Client, EngineUnreachableError
from .load import MAX_COUNT, EngineMetrics, read_metrics

Read = TypeVar("Read")

PROBE_TIMEOUT_S = 10.0
#: A text whose token ids differ between tokenizers: several scripts, digits, white space, no special tokens.
CANARY = "The quick brown fox jumps over 13 lazy dogs.\n\n  Größe, naïve, 東京, привет \t{'a': [1, 22, 333]}"

#: Chats that templates render differently: with and without a system prompt, and with an earlier answer.
CANARY_CHATS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": CANARY}],
    [
        {"role": "system", "content": f" {CANARY}\n"},
        {"role": "user", "content": f"\n{CANARY} "},
        {"role": "assistant", "content": CANARY},
        {"role": "user", "content": "?"},
    ],
)


@dataclass(slots=True, frozen=True)
class EngineRequirements:
    """The requirements for external engines."""

    model_names: tuple[str, ...]  #: accepted names of the served model
    max_model_len: int
    block_size: int
    canary_ids: tuple[int, ...] | None  #: the router's token ids of `CANARY`; None: not compared here
    max_running_requests: int
    key_of: Callable[[str], str] = lambda _url: ""  #: the API key for the server at a URL; empty: none
    #: the router's token ids of `CANARY_CHATS`, with its template; empty where it refuses a chat, or if not compared
    chat_ids: tuple[tuple[int, ...], ...] = ()


def requirements_of(description: ReplicaDescription) -> EngineRequirements:
    """Terms for an engine that the cluster started, whose tokenizer and block size it has already compared."""
    return EngineRequirements(
        model_names=(description.model.name,),
        max_model_len=description.model.max_model_len,
        block_size=description.parity.block_size,
        canary_ids=None,
        max_running_requests=description.max_running_requests,
    )


_Name = Annotated[str, Meta(max_length=1024)]


class Card(msgspec.Struct, frozen=True):
    """A model in `/v1/models`."""

    id: _Name
    root: _Name | None = None  #: the folder or hub name that it was loaded from
    max_model_len: Annotated[int, Meta(le=MAX_COUNT)] | None = None
    parent: _Name | None = None  #: of an adapter: the model that it belongs to


class _Cards(msgspec.Struct, frozen=True):
    data: Annotated[list[Card], Meta(max_length=1024)] = []


class _Tokens(msgspec.Struct, frozen=True):
    tokens: list[TokenId]


def examine(
    replica: str,
    requirements: EngineRequirements,
    cards: Sequence[Card],
    canary_ids: Sequence[int] | None,
    block_size: int | None,
) -> str:
    """Return the model's name at the engine. Arguments are None if not reported. Raises ParityMismatch."""
    card = next((card for card in cards if {card.id, card.root} & set(requirements.model_names)), None)
    if card is None:
        offered = ", ".join(card.id for card in cards[:8]) or "none"
        wanted = " or ".join(requirements.model_names)
        raise ParityMismatch(replica, "model", wanted, offered, remedy="pass its name with --backend-model")
    if card.max_model_len is not None and card.max_model_len < requirements.max_model_len:
        remedy = f"start homing with --max-model-len {card.max_model_len}"
        raise ParityMismatch(replica, "max_model_len", requirements.max_model_len, card.max_model_len, remedy=remedy)
    if canary_ids is not None and requirements.canary_ids not in (None, tuple(canary_ids)):
        remedy = "MODEL must be the folder of the model that the backend serves"
        raise ParityMismatch(replica, "tokenizer", requirements.canary_ids, tuple(canary_ids), remedy=remedy)
    if block_size is not None and block_size != requirements.block_size:
        remedy = f"start homing with --block-size {block_size}"
        raise ParityMismatch(replica, "block_size", requirements.block_size, block_size, remedy=remedy)
    return card.id


class Probed(NamedTuple):
    model: str  #: the model's name at the engine
    adapters: frozenset[str]  #: names of its adapters there
    metrics: EngineMetrics


def adapters_among(cards: Sequence[Card], model: str) -> frozenset[str]:
    """The adapters of the model with this name: vLLM and SGLang name their parent."""
    names = {name for card in cards if card.id == model for name in (card.id, card.root) if name}
    return frozenset(card.id for card in cards if card.parent in names and card.id not in names)


async def probe(client: Client, replica: str, requirements: EngineRequirements, rank: int | None = None) -> Probed:
    """Query the model's name and adapters, and the metrics. Raises EngineUnreachableError or ParityMismatch."""
    health = await client.ask("GET", "/health", timeout_s=PROBE_TIMEOUT_S)
    if health.status != 200:
        raise EngineUnreachableError(f"{client.address.url}/health answers {health.status}")
    cards = await read_cards(client)
    if cards is None:
        raise EngineUnreachableError(f"{client.address.url}/v1/models cannot be read")
    asked = msgspec.json.encode({"prompt": CANARY, "add_special_tokens": False})
    tokens = await _read(client, "POST", "/tokenize", asked, _Tokens)
    metrics = await ask_metrics(client, PROBE_TIMEOUT_S, rank)
    model = examine(replica, requirements, cards, tokens.tokens if tokens else None, metrics.block_size)
    return Probed(model, adapters_among(cards, model), metrics)


async def renders_alike(client: Client, requirements: EngineRequirements) -> bool | None:
    """Whether the engine renders chats like this router; None: unknown. Raises EngineUnreachableError."""
    alike: bool | None = None
    for chat, ours in zip(CANARY_CHATS, requirements.chat_ids, strict=False):
        if not ours:
            continue
        asked = msgspec.json.encode({"messages": chat, "add_generation_prompt": True})
        tokens = await _read(client, "POST", "/tokenize", asked, _Tokens)
        if tokens is None:
            return None
        if tuple(tokens.tokens) != ours:
            return False
        alike = True
    return alike


async def read_cards(client: Client) -> list[Card] | None:
    """The models that the engine offers; None: not reported. Raises EngineUnreachableError."""
    cards = await _read(client, "GET", "/v1/models", b"", _Cards)
    return None if cards is None else cards.data


async def ask_metrics(client: Client, timeout_s: float, rank: int | None = None) -> EngineMetrics:
    """The engine's `/metrics`; empty if it has none. Raises EngineUnreachableError."""
    answer = await client.ask("GET", "/metrics", timeout_s=timeout_s)
    return read_metrics(answer.body.decode(errors="replace"), rank) if answer.status == 200 else EngineMetrics()


async def _read(client: Client, method: str, path: str, body: bytes, kind: type[Read]) -> Read | None:
    """Query and decode JSON; None if the server has no such path or the answer has another form."""
    answer = await client.ask(method, path, body, timeout_s=PROBE_TIMEOUT_S)
    if answer.status != 200:
        return None
    try:
        return msgspec.json.decode(answer.body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
