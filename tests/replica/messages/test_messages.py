"""Validity of wire messages."""

import msgspec
import pytest

from homing.replica.messages import Constraint, Generate, Request, SamplingParams, TokenBatch, TokenOutput


@pytest.mark.parametrize("token_id", [-1, 1 << 32, -(1 << 62)])
def test_a_token_that_no_request_could_be_sent_with_is_malformed(token_id: int) -> None:
    """Decoding must refuse it: failing only on continuation would break a callback that serves other requests."""
    batch = TokenBatch(step=1, outputs=[TokenOutput(1, 0, [7, token_id])])

    with pytest.raises(msgspec.ValidationError, match=r"outputs\[0\]"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=TokenBatch)


def test_tokens_come_as_they_were_sent() -> None:
    """Includes the largest token id."""
    batch = TokenBatch(step=1, outputs=[TokenOutput(1, 0, [0, (1 << 32) - 1])])

    assert msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=TokenBatch) == batch


def test_a_constraint_reaches_the_replica_as_it_was_checked() -> None:
    """Messages from earlier router versions, without a constraint, still decode."""
    sampling = SamplingParams(max_tokens=3)
    constraint = Constraint(kind="json_schema", source='{"type": "integer"}', after=(5, 6))
    plain = Generate(
        request_id=1, token_ids=b"\0" * 4, prompt_tokens=1, root=b"\0" * 16, block_hashes=b"", sampling=sampling
    )

    for request in (plain, msgspec.structs.replace(plain, constraint=constraint)):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=Request) == request
    assert b"constraint" not in msgspec.msgpack.encode(plain)


def test_replicas_and_routers_of_two_versions_understand_each_other() -> None:
    """During an update, a router meets replicas that do not know tenants, and the other way round."""
    fields = {"token_ids": b"\1\0\0\0", "prompt_tokens": 1, "root": bytes(16), "block_hashes": b""}
    told = Generate(request_id=7, sampling=SamplingParams(max_tokens=1), tenant=b"acme", weight=2.0, **fields)

    class Older(msgspec.Struct, tag="generate", kw_only=True):
        request_id: int
        prompt_tokens: int

    older = msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=Older)
    untold = {"type": "generate", "request_id": 7, "sampling": {"max_tokens": 1}, **fields}
    newer = msgspec.msgpack.decode(msgspec.msgpack.encode(untold), type=Generate)

    assert older == Older(request_id=7, prompt_tokens=1)
    assert (newer.tenant, newer.weight) == (b"", 1.0)
