"""Reads long bodies step by step: their cost first, then their values. Short ones need none of this."""

from collections.abc import Generator, Sequence
from typing import TypeVar

from ..errors import InvalidRequest
from .body_cost import MAX_COST, SLICE_BYTES, cost_at_most, costs, dearest_field
from .protocol.exchange import ClientGoneError, Exchange
from .turns import Turns

Result = TypeVar("Result")

#: Bodies up to this size are read in place: at most 0.5 ms for each of the steps.
INLINE_BYTES = 16 * 1024
#: The cost of bodies up to this size is not estimated: no decoder takes more than 8 ms.
UNMEASURED_BYTES = 256 * 1024


class BodyReader:
    """Gives the bodies of all tenants their turns."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    async def read(
        self,
        exchange: Exchange,
        steps: Generator[None, None, Result],
        tenant: bytes,
        fields: Sequence[str],
    ) -> Result:
        """What the steps make of the body. Raises InvalidRequest and ClientGoneError.

        `fields`: those that a body may have, for the error of one that is too costly.
        """
        data = exchange.request.body
        if len(data) > UNMEASURED_BYTES:
            await self._check_cost(exchange, tenant, fields)
        while True:
            await self.turn(exchange, tenant)
            try:
                next(steps)
            except StopIteration as done:
                result: Result = done.value
                break
        await self.turn(exchange, tenant)  # what follows is another step
        return result

    async def _check_cost(self, exchange: Exchange, tenant: bytes, fields: Sequence[str]) -> None:
        body = exchange.request.body
        bound = 0
        for start in range(0, len(body), SLICE_BYTES):
            await self.turn(exchange, tenant)
            bound += cost_at_most(body[start : start + SLICE_BYTES])
            if bound > MAX_COST:
                break
        else:
            return
        for end, cost in costs(body):
            if cost > MAX_COST:
                raise _too_costly(dearest_field(body[:end], fields))
            await self.turn(exchange, tenant)

    async def turn(self, exchange: Exchange, tenant: bytes) -> None:
        """Wait for a turn of the loop. Raises ClientGoneError."""
        await self._turns.next(tenant)
        if exchange.gone:
            raise ClientGoneError


def _too_costly(field: str | None) -> InvalidRequest:
    where = f"field {field!r}: " if field else ""
    return InvalidRequest(
        f"{where}the body has too many values: the maximum is {MAX_COST}, where a text counts 3, an entry of "
        "an object 5 more, a list or an object 6, and 2 escapes or 32 bytes 1",
        param=field,
    )
