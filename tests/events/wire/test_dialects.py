"""Payloads of every dialect decode to the same structs; anything else raises MalformedFrame."""

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from homing.events import Cleared, Removed, Stored
from homing.events.errors import MalformedFrame
from homing.events.wire.cache_events import wire_hash
from homing.events.wire.dialects import BatchDecoder
from homing.events.wire.messages import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch

MAX = 2**64 - 1
pack = msgspec.msgpack.encode


def stored(**changes: object) -> dict[str, object]:
    """A `BlockStored` map as vLLM sends it."""
    return {
        "type": "BlockStored",
        "block_hashes": [11, 12],
        "parent_block_hash": 10,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    } | changes


def test_our_own_batches_are_read_back_as_they_were_meant() -> None:
    """A round trip through the real encoder, with the largest possible hash."""
    event = BlockStored(
        block_hashes=[MAX, 1],
        parent_block_hash=None,
        token_ids=[5, 6],
        block_size=1,
        lora_id=None,
        medium="CPU",
        lora_name="adapter",
        group_idx=0,
    )
    payload = pack(EventBatch(1.5, [event, BlockRemoved(block_hashes=[3], medium="CPU"), AllBlocksCleared()], 0))

    batch = BatchDecoder(token_ids=True).decode(payload)

    assert batch.ts == 1.5
    assert batch.data_parallel_rank == 0
    assert batch.events == [
        Stored(None, [MAX, 1], [5, 6], 1, "CPU", 0, "adapter"),
        Removed([3], "CPU"),
        Cleared(),
    ]


@pytest.mark.parametrize(
    "event",
    [
        stored(),
        stored(some_future_key={"a": [1]}),
        ["BlockStored", [11, 12], 10, [1, 2, 3, 4], 2, None, "GPU"],
        ["BlockStored", [11, 12], 10, [1, 2, 3, 4], 2, None, "GPU", None, None, None, None, None, "some future field"],
        stored(block_hashes=[b"\0" * 24 + n.to_bytes(8, "big") for n in (11, 12)], parent_block_hash=b"\x0a"),
    ],
    ids=["map", "unknown key", "positional", "longer positional", "bytes"],
)
def test_every_dialect_means_the_same(event: object) -> None:
    """All these forms are in use; their meaning must not depend on the encoding."""
    batch = BatchDecoder(token_ids=True).decode(pack([1.0, [event]]))

    assert batch.events == [Stored(10, [11, 12], [1, 2, 3, 4], 2, "GPU")]


def test_sglangs_positional_form_ends_in_a_map_that_is_no_adapter() -> None:
    """vLLM has the adapter's name where SGLang has a map with a salt; signed hashes are the same 64 bits."""
    event = ["BlockStored", [-1], None, [7], 1, None, "GPU", {"cache_salt": "tenant-a"}]

    batch = BatchDecoder(token_ids=True).decode(pack([1.0, [event]]))

    assert batch.events == [Stored(None, [MAX], [7], 1, "GPU", extra_keys=[["tenant-a"]])]


def test_sglangs_salt_belongs_to_the_first_block_of_a_chain() -> None:
    """vLLM names it there alone; SGLang repeats it in every event. Without it a tenant would get another's credit."""
    first, next_ = (stored(token_ids=[1, 2, 3, 4], parent_block_hash=each, cache_salt="t") for each in (None, 10))

    batch = BatchDecoder(token_ids=True).decode(pack([1.0, [first, next_]]))

    assert [event.extra_keys for event in batch.events] == [[["t"]], None]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"cache_salt": "t", "extra_keys": [["a picture"], ["another"]]}, [["a picture", "t"], ["another"]]),
        ({"cache_salt": "t", "extra_keys": [["t"], None]}, [["t"], None]),
        ({"cache_salt": "t", "extra_keys": [None, ["a picture"]]}, [["t"], ["a picture"]]),
        ({"cache_salt": "t"}, [["t"]]),
        ({"extra_keys": [["t"], None]}, [["t"], None]),
    ],
)
def test_a_salt_joins_the_other_keys_of_the_first_block(given: dict[str, object], kept: list[object]) -> None:
    """Publishers may send both forms; neither replaces the other."""
    event = stored(parent_block_hash=None, token_ids=[1, 2, 3, 4], **given)

    assert BatchDecoder(token_ids=True).decode(pack([1.0, [event]])).events[0].extra_keys == kept


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"lora_id": 3, "lora_name": "poet"}, "poet"),
        ({"lora_id": 3}, "lora_id:3"),
        ({"lora_id": None}, None),
        ({"lora_id": "3"}, None),
    ],
)
def test_an_adapter_without_a_name_is_still_an_adapter(fields: dict[str, object], name: str | None) -> None:
    """SGLang up to 0.5.18 tells its number only: its blocks are not the base model's."""
    (event,) = BatchDecoder(token_ids=True).decode(pack([1.0, [stored(**fields)]])).events

    assert event.lora_name == name


def test_a_batch_may_be_a_map() -> None:
    """One vLLM version sent batches as maps."""
    payload = pack({"ts": 2, "events": [{"type": "AllBlocksCleared"}], "data_parallel_rank": 3})

    batch = BatchDecoder().decode(payload)

    assert (batch.ts, batch.events, batch.data_parallel_rank) == (2.0, [Cleared()], 3)


@pytest.mark.parametrize("form", [stored(token_ids=[1]), ["BlockStored", [11, 12], 10, [1], 2, None, "GPU"]])
def test_sparse_token_ids_leave_the_hashes_usable(form: object) -> None:
    """Some cache groups send fewer tokens; SGLang's router once dropped whole batches for that, removals included."""
    batch = BatchDecoder(token_ids=True).decode(pack([1.0, [form]]))

    assert batch.events == [Stored(10, [11, 12], (), 2, "GPU")]


def test_token_ids_are_skipped_unless_asked_for() -> None:
    """A router needs only hashes from our own replicas."""
    assert BatchDecoder().decode(pack([1.0, [stored()]])).events == [Stored(10, [11, 12], (), 2, "GPU")]


def test_unknown_event_types_are_logged_and_the_others_kept(caplog: pytest.LogCaptureFixture) -> None:
    """A newer publisher must neither silence nor reset an older reader; each unknown type is logged once."""
    decoder = BatchDecoder()
    payload = pack([1.0, [{"type": "BlockPinned"}, ["Else", 1], {"type": "BlockRemoved", "block_hashes": [5]}]])

    with caplog.at_level("WARNING"):
        batches = [decoder.decode(payload) for _ in range(2)]

    assert [batch.events for batch in batches] == [[Removed([5])]] * 2
    assert [record.getMessage() for record in caplog.records] == [
        "event_type_unknown type='BlockPinned'",
        "event_type_unknown type='Else'",
    ]


def test_map_headers_of_any_width_are_read() -> None:
    """msgspec itself encodes some small maps as map16."""
    body = pack("type") + pack("BlockRemoved") + pack("block_hashes") + pack([5]) + pack("medium") + pack(None)
    for header in (b"\x83", b"\xde\x00\x03", b"\xdf\x00\x00\x00\x03"):
        payload = b"\x92" + pack(1.0) + b"\x91" + header + body

        assert BatchDecoder().decode(payload).events == [Removed([5])]


@pytest.mark.parametrize(
    ("payload", "what"),
    [
        (b"", "event batch"),
        (b"\xc1", "event batch"),
        (pack(5), "event batch"),
        (pack([1.0]), "event batch"),
        (pack(["now", []]), "event batch"),
        (pack([1.0, 5]), "event batch"),
        (b"\x94" + pack(1.0) + pack([]) + pack(0) + b"\x91" * 5000, "event batch"),
    ],
)
def test_a_malformed_payload_is_one_error_that_names_the_part(payload: bytes, what: str) -> None:
    """The log must show which part of the format to look at."""
    with pytest.raises(MalformedFrame) as caught:
        BatchDecoder().decode(payload)

    assert caught.value.what == what


@pytest.mark.parametrize(
    ("event", "what"),
    [
        (5, "event"),
        ([], "event"),
        ({"block_hashes": []}, "event"),
        ({"type": ["BlockStored"]}, "event"),
        ([["BlockStored"]], "event"),
        (stored(block_hashes="x"), "BlockStored"),
        (stored(block_hashes=[1.5]), "block hash"),
        (stored(parent_block_hash="x"), "block hash"),
        (stored(block_size=None), "BlockStored"),
    ],
)
def test_an_event_that_cannot_be_read_spoils_no_other(event: object, what: str) -> None:
    """Removals in the same batch would otherwise be lost, and blocks be credited that are gone."""
    batch = BatchDecoder().decode(pack([1.0, [event, ["BlockRemoved", [5, "x", 6]], stored()]]))

    assert batch.events == [Removed([5, 6]), Stored(10, [11, 12], (), 2, "GPU")]
    assert [each.what for each in batch.unreadable] == [what]


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ([[1, 2], [2, 3], [3, 4], [4, 5]], [1, 2, 3, 4]),  # SGLang with EAGLE
        ("abcd", []),
        ([1, 2, 3, None], []),
        ([[1, 2], 2, 3, 4], []),
        ({"a": 1}, []),
    ],
)
def test_tokens_in_another_form_leave_the_event_readable(given: object, read: Sequence[int]) -> None:
    """Pairs of a token and its successor are read as the tokens that they begin with."""
    batch = BatchDecoder(token_ids=True).decode(pack([1.0, [stored(token_ids=given)]]))

    assert batch.events == [Stored(10, [11, 12], read, 2, "GPU")]
    assert not batch.unreadable


def test_blocks_in_a_store_that_engines_share_are_told_apart() -> None:
    """They are no reason to prefer the engine that announces them."""
    shared = {"locality": "REMOTE", "medium": "STORAGE"}
    removed = {"type": "BlockRemoved", "block_hashes": [5], **shared}

    events = BatchDecoder().decode(pack([1.0, [stored(**shared), removed, stored(locality="LOCAL"), stored()]])).events

    assert [getattr(each, "remote", None) for each in events] == [True, True, False, False]


@given(st.binary(max_size=60))
def test_any_bytes_are_a_batch_or_that_error(payload: bytes) -> None:
    """Payloads come from a socket and may contain anything."""
    _decode_or_refuse(payload)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), MAX) | st.floats() | st.text(max_size=4) | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(sorted(stored())), VALUES, st.booleans())
def test_any_value_in_any_field_is_a_batch_or_that_error(field: str, value: object, token_ids: bool) -> None:
    """A message that is nearly valid gets deeper into the decoder."""
    for payload in (pack([1.0, [stored(**{field: value})]]), pack([1.0, [["BlockRemoved", value]]])):
        _decode_or_refuse(payload, token_ids=token_ids)


def _decode_or_refuse(payload: bytes, *, token_ids: bool = False) -> None:
    try:
        batch = BatchDecoder(token_ids=token_ids).decode(payload)
    except MalformedFrame:
        return
    for event in batch.events:
        if isinstance(event, Stored | Removed):
            assert all(0 <= block <= MAX for block in event.hashes)


def test_a_hash_is_named_by_its_last_eight_bytes() -> None:
    """vLLM truncates its hashes the same way, so both encodings of a stream give the same wire hashes."""
    assert wire_hash(bytes(range(16))) == int.from_bytes(bytes(range(8, 16)), "big")
    assert wire_hash(-1) == MAX
