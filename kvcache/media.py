"""Images, sounds and other items inside a prompt: what they add to the hashes of the blocks that they overlap.

Pure arithmetic over positions. An item's tokens are placeholders, alike for all images, so its content has to enter the
hash: two prompts that differ in an image alone must not share KV. Serving such models is not part of the engine yet;
router and replica will both take their extras from here. What compares tokens alone, the reuse of a part of a block,
must then pass such prompts over: the tokens of two different images are the same.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from .hashing import canonical


@dataclass(slots=True, frozen=True)
class MediaItem:
    """One item and the placeholder tokens that stand for it."""

    digest: bytes  #: of what the encoder is given: the content *after* scaling, sampling and the like
    start: int  #: position of its first token in the prompt
    num_tokens: int  #: at least 1

    @property
    def stop(self) -> int:
        """Position after its last token."""
        return self.start + self.num_tokens


def block_extras(items: Iterable[MediaItem], block_size: int) -> dict[int, bytes]:
    """What `BlockHasher.chain` takes as `extras` for a whole prompt: by block, its items in order of position.

    Of each item that overlaps the block: its digest, and where the item begins, counted from the block's first token.
    """
    extras: dict[int, bytes] = {}
    for item in sorted(items, key=lambda item: item.start):
        assert item.num_tokens > 0, f"an item of {item.num_tokens} tokens"
        for block in range(item.start // block_size, (item.stop - 1) // block_size + 1):
            begins = (item.start - block * block_size).to_bytes(8, "little", signed=True)
            extras[block] = extras.get(block, b"") + canonical(item.digest, begins)
    return extras
