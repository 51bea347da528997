"""Membership: which replicas may join."""

from pathlib import Path

import msgspec
import pytest

from homing.replica.messages import Parity
from homing.router.errors import ParityMismatch
from homing.router.replicas.membership import changes, compare, own_parity, text_digests

from ..fakes import CACHE, DIGESTS, ROOT, SEED, description_of, parity_of


def test_a_replica_of_the_same_deployment_agrees() -> None:
    """The router derives its side from its own files, settings and seed."""
    compare(own_parity(DIGESTS, CACHE, SEED, ROOT), parity_of(), "r0")


@pytest.mark.parametrize("field", Parity.__struct_fields__)
def test_any_difference_is_refused_by_name(field: str) -> None:
    """A silent hit rate of zero is the field's most frequent complaint."""
    value = getattr(parity_of(), field)
    other = value + 1 if isinstance(value, int) else value[:-1]
    theirs = msgspec.structs.replace(parity_of(), **{field: other})

    with pytest.raises(ParityMismatch, match=field) as caught:
        compare(own_parity(DIGESTS, CACHE, SEED, ROOT), theirs, "r0")

    assert (caught.value.field, caught.value.replica_id) == (field, "r0")


def test_another_seed_shows_in_the_canary() -> None:
    """All digests agree, but no block hash would."""
    with pytest.raises(ParityMismatch, match="canary"):
        compare(own_parity(DIGESTS, CACHE, SEED + 1, ROOT), parity_of(), "r0")


def test_a_changed_tokenizer_or_template_changes_its_digest(tmp_path: Path) -> None:
    """Both are read from the folder that the router itself uses."""
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("a")
    before = text_digests(tmp_path)

    (tmp_path / "chat_template.jinja").write_text("b")
    after = text_digests(tmp_path)

    assert before.tokenizer == after.tokenizer
    assert before.template != after.template


def test_a_full_view_is_told_apart_from_what_is_known() -> None:
    """A rebuilt replica keeps its name but is a new one: the old one is lost, the new one joins."""
    known = {"same": 1, "rebuilt": 1, "gone": 1}
    view = [description_of("same"), description_of("rebuilt", epoch=2), description_of("new")]

    lost, joined = changes(known, view)

    assert set(lost) == {"rebuilt", "gone"}
    assert [replica.replica_id for replica in joined] == ["rebuilt", "new"]
