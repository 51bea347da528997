"""Names for prefixes, made from names of blocks. Pure: knows ids only.

A trace may give equal ids to equal blocks behind different prefixes. What counts for a cache is the prefix, so each
pair of a prefix and the id that follows it gets a number of its own.
"""

from collections.abc import Iterable


class PrefixNames:
    """Numbers prefixes in the order in which they are first seen; keeps one entry for each distinct prefix."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}

    def chain(self, block_ids: Iterable[int]) -> list[int]:
        """A number for each prefix of these blocks; equal numbers mean equal prefixes."""
        numbers = self._numbers
        names: list[int] = []
        name = -1
        for block_id in block_ids:
            name = numbers.setdefault((name, block_id), len(numbers))
            names.append(name)
        return names
