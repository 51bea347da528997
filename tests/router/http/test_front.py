"""Text sides of models: loaded once for each tokenizer that is served, and forgotten with it."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from homing.router.http.front import TextModels
from homing.router.replicas.membership import TextDigests, TextSource

FOX, FOX_LATER, OWL = (
    TextSource(path, TextDigests(tokenizer, "")) for path, tokenizer in (("fox", "1"), ("fox", "2"), ("owl", "1"))
)


class FakeText:
    """Knows where it came from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder


@pytest.fixture
def texts() -> Any:
    return TextModels(FakeText)  # type: ignore[arg-type]


async def test_a_tokenizer_that_was_replaced_in_its_folder_is_loaded_anew(texts: TextModels) -> None:
    """An update may change the files where they lie: with the old ids the new replicas would answer nonsense."""
    before, again, after = [await texts.get(source) for source in (FOX, FOX, FOX_LATER)]

    assert before is again
    assert after is not before
    assert await texts.get(FOX) is before


async def test_what_is_served_no_longer_is_forgotten(texts: TextModels) -> None:
    """Each update to another model would else leave a tokenizer, its cache and its threads behind."""
    texts.keep([FOX, OWL])
    for source in (FOX, OWL):
        await texts.get(source)
    gone = weakref.ref(await texts.get(FOX))

    texts.keep([OWL])

    gc.collect()
    assert (texts.loaded(FOX), texts.loaded(OWL)) == (False, True)
    assert gone() is None


async def test_what_was_loaded_ahead_waits_for_its_first_replica(texts: TextModels) -> None:
    """Other models' replicas come and go until then."""
    await texts.get(FOX)

    texts.keep([OWL])
    assert texts.loaded(FOX)
    texts.keep([FOX, OWL])
    texts.keep([OWL])

    assert not texts.loaded(FOX)
