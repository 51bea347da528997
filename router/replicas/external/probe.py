"""Whether an engine may stand behind this router: the right model, tokens that mean the same, blocks of our size.

`examine` decides, purely; `probe` asks. What differs is a loud refusal, since it would otherwise show as wrong answers
or as a hit rate of zero. What an engine does not tell cannot be compared, and is not held against it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from ...errors import ParityMismatch
from .engine_metrics import Numbers, read_numbers
from .http_client import BackendUnreachableError, Client

Read = TypeVar("Read")

PROBE_TIMEOUT_S = 10.0
#: Its ids tell tokenizers apart: letters of several scripts, digits, white space, no special tokens.
CANARY = "The quick brown fox jumps over 13 lazy dogs.\n\n  Größe, naïve, 東京, привет \t{'a': [1, 22, 333]}"


@dataclass(slots=True, frozen=True)
class ForeignTerms:
    """What this router expects of every foreign engine."""

    model_names: tuple[str, ...]  #: any of these is the served model
    max_model_len: int
    block_size: int
    canary_ids: tuple[int, ...]  #: of `CANARY`, by the router's tokenizer
    max_running_requests: int
    api_key: str = ""


class Card(msgspec.Struct, frozen=True):
    """A model in `/v1/models`."""

    id: str
    root: str | None = None  #: the folder or hub name that it was loaded from
    max_model_len: int | None = None


class Cards(msgspec.Struct, frozen=True):
    """The body of `/v1/models`."""

    data: list[Card] = []


class _Tokens(msgspec.Struct, frozen=True):
    tokens: list[int]


@dataclass(slots=True, frozen=True)
class Told:
    """What an engine says of itself; None: nothing."""

    cards: Sequence[Card]
    canary_ids: Sequence[int] | None
    numbers: Numbers


@dataclass(slots=True, frozen=True)
class Engine:
    """An engine that was let in."""

    model: str  #: its name of the model
    numbers: Numbers


def examine(replica: str, terms: ForeignTerms, told: Told) -> Engine:
    """The engine, if nothing speaks against it. Raises ParityMismatch."""
    card = next((card for card in told.cards if {card.id, card.root} & set(terms.model_names)), None)
    if card is None:
        offered = ", ".join(card.id for card in told.cards) or "none"
        raise ParityMismatch(
            replica, "model", " or ".join(terms.model_names), offered, remedy="name the backend's by --backend-model"
        )
    if card.max_model_len is not None and card.max_model_len < terms.max_model_len:
        remedy = f"start homing with --max-model-len {card.max_model_len}"
        raise ParityMismatch(replica, "max_model_len", terms.max_model_len, card.max_model_len, remedy=remedy)
    if told.canary_ids is not None and tuple(told.canary_ids) != terms.canary_ids:
        remedy = "MODEL must be the folder of the model that the backend serves"
        raise ParityMismatch(replica, "tokenizer", terms.canary_ids, tuple(told.canary_ids), remedy=remedy)
    size = told.numbers.block_size
    if size is not None and size != terms.block_size:
        raise ParityMismatch(
            replica, "block_size", terms.block_size, size, remedy=f"start homing with --block-size {size}"
        )
    return Engine(card.id, told.numbers)


async def probe(client: Client, replica: str, terms: ForeignTerms) -> Engine:
    """Ask and decide. Raises BackendUnreachableError or ParityMismatch."""
    health = await client.ask("GET", "/health", timeout_s=PROBE_TIMEOUT_S)
    if health.status != 200:
        raise BackendUnreachableError(f"{client.address.url}/health answers {health.status}")
    cards = await _read(client, "GET", "/v1/models", b"", Cards)
    if cards is None:
        raise BackendUnreachableError(f"{client.address.url}/v1/models cannot be read")
    asked = msgspec.json.encode({"prompt": CANARY, "add_special_tokens": False})
    tokens = await _read(client, "POST", "/tokenize", asked, _Tokens)
    told = Told(cards.data, tokens.tokens if tokens else None, await ask_numbers(client, PROBE_TIMEOUT_S))
    return examine(replica, terms, told)


async def ask_numbers(client: Client, timeout_s: float) -> Numbers:
    """What `/metrics` says; nothing, where there is none. Raises BackendUnreachableError."""
    answer = await client.ask("GET", "/metrics", timeout_s=timeout_s)
    return read_numbers(answer.body.decode(errors="replace")) if answer.status == 200 else Numbers()


async def _read(client: Client, method: str, path: str, body: bytes, kind: type[Read]) -> Read | None:
    """None where the server has no such path, or answers something else."""
    answer = await client.ask(method, path, body, timeout_s=PROBE_TIMEOUT_S)
    if answer.status != 200:
        return None
    try:
        return msgspec.json.decode(answer.body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
