"""Describes the external engines in the settings as replicas. Pure: settings in, descriptions out."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from ....events.wire.messages import EventEndpoints
from ....kvcache.hashing import HASH_BYTES, BlockHash, canonical
from ....replica.messages import ModelLimits, Parity, ReplicaDescription
from ...config import RouterSettings
from ...errors import BackendsInvalid
from .http_client import Address
from .load import UNKNOWN_BLOCKS, UNKNOWN_DECODE_STEP_S, UNKNOWN_PREFILL_TOKENS_PER_S

#: Assumed step size, as engines do not report it: vLLM's default on GPUs. Used only to estimate decode interference.
TYPICAL_BATCHED_TOKENS = 8192


@dataclass(slots=True, frozen=True)
class ReplicaAddress:
    """One replica of an external engine: its server and its event addresses (empty: it publishes none)."""

    replica_id: str
    address: Address
    events: str
    replay: str
    rank: int | None = None  #: data-parallel rank that this replica is; None: the engine has a single one


def replica_addresses(settings: RouterSettings) -> list[ReplicaAddress]:
    """The engines in the settings, named b0, b1, … in that order. Raises BackendsInvalid."""
    urls = _items(settings.backend)
    if "" in urls:
        raise BackendsInvalid("backend: an address between two commas is empty")
    events = _endpoints("events", settings.events, len(urls))
    replay = _endpoints("replay", settings.replay, len(urls))
    servers = [Address.of(url) for url in urls]
    check_distinct([server.url for server in servers])
    return [ReplicaAddress(f"b{place}", *each) for place, each in enumerate(zip(servers, events, replay, strict=True))]


def check_distinct(urls: Sequence[str]) -> None:
    """Raise BackendsInvalid if a server is named twice."""
    if twice := [url for url, count in Counter(urls).items() if count > 1]:
        raise BackendsInvalid(f"a server is named twice: {twice[0]}")


def external_root(model: str) -> BlockHash:
    """Root of the block hashes of an external engine's model, from its name, as the weights are unknown here."""
    return BlockHash(sha256(canonical(b"homing-foreign", model.encode())).digest()[:HASH_BYTES])


def describe(
    replica: ReplicaAddress, parity: Parity, limits: ModelLimits, *, max_running_requests: int
) -> ReplicaDescription:
    """Describe the engine as a replica, with defaults for what only probing can tell."""
    return ReplicaDescription(
        replica_id=replica.replica_id,
        epoch=0,
        request_endpoint=replica.address.url,
        event_endpoints=EventEndpoints(events=replica.events, replay=replica.replay, state="", snapshot=""),
        parity=parity,
        model=limits,
        num_blocks=UNKNOWN_BLOCKS,
        max_running_requests=max_running_requests,
        max_batched_tokens=TYPICAL_BATCHED_TOKENS,
        tensor_parallel_size=1,
        prefill_tokens_per_s=UNKNOWN_PREFILL_TOKENS_PER_S,
        decode_step_s=UNKNOWN_DECODE_STEP_S,
        node=replica.address.host,
        external=True,
        data_parallel_rank=replica.rank,
    )


def _items(text: str) -> list[str]:
    return [item.strip() for item in text.split(",")] if text.strip() else []


def _endpoints(name: str, text: str, count: int) -> Sequence[str]:
    items = _items(text)
    if not items:
        return [""] * count
    if len(items) != count:
        raise BackendsInvalid(f"{name}: {len(items)} addresses for {count} backends; give one for each, in their order")
    for item in items:
        check_endpoint(name, item)
    return items


def check_endpoint(name: str, endpoint: str) -> None:
    """Raise BackendsInvalid unless `endpoint` is empty or an address to connect to."""
    if endpoint and not endpoint.startswith(("tcp://", "ipc://")):
        raise BackendsInvalid(f"{name}: {endpoint!r} is not a ZeroMQ address such as tcp://10.0.0.1:5557")
    if "*" in endpoint:
        raise BackendsInvalid(f"{name}: {endpoint!r} is where the engine binds; name its host instead of *")
