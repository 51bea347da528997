"""Reads long bodies step by step: estimates their cost, then decodes them. Short bodies do not need it."""

from collections.abc import Generator, Sequence
from typing import TypeVar

from ..errors import InvalidRequest
from .body_cost import MAX_COST, SLICE_BYTES, cost_bound, last_field, running_costs
from .protocol.exchange import ClientGoneError, Exchange
from .turns import Turns

Result = TypeVar("Result")

#: Bodies up to this size are decoded immediately: each step takes at most 1 ms (0.4 ms measured). Waiting for a turn
#: costs a task and a loop iteration or two: with 16 KiB, a prompt of 16 KB took a quarter more CPU time.
INLINE_BYTES = 32 * 1024
#: The cost of bodies up to this size is not estimated: no decoder takes more than 8 ms.
UNMEASURED_BYTES = 256 * 1024


class BodyReader:
    """Reads the bodies of all tenants, which take turns on the event loop."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    async def read(
        self,
        exchange: Exchange,
        steps: Generator[None, None, Result],
        tenant: bytes,
        fields: Sequence[str],
    ) -> Result:
        """Check the body's cost, run `steps`, and return their result. Raises InvalidRequest and ClientGoneError.

        `fields`: names of the fields that a body may have; the error for a body that is too costly names one of them.
        """
        data = exchange.request.body
        if len(data) > UNMEASURED_BYTES:
            await self._check_cost(exchange, tenant, fields)
        result = await self.run(exchange, steps, tenant)
        await self.turn(exchange, tenant)  # what the caller does next is another step
        return result

    async def run(self, exchange: Exchange, steps: Generator[None, None, Result], tenant: bytes) -> Result:
        """The result of `steps`, each of which is a turn. Raises what they raise, and ClientGoneError."""
        while True:
            await self.turn(exchange, tenant)
            try:
                next(steps)
            except StopIteration as done:
                result: Result = done.value
                return result

    async def _check_cost(self, exchange: Exchange, tenant: bytes, fields: Sequence[str]) -> None:
        body = exchange.request.body
        bound = 0
        for start in range(0, len(body), SLICE_BYTES):
            await self.turn(exchange, tenant)
            bound += cost_bound(body[start : start + SLICE_BYTES])
            if bound > MAX_COST:
                break
        else:
            return
        for end, cost in running_costs(body):
            if cost > MAX_COST:
                raise _too_costly(last_field(body[:end], fields))
            await self.turn(exchange, tenant)

    async def turn(self, exchange: Exchange, tenant: bytes) -> None:
        """Wait for this tenant's turn. Raises ClientGoneError."""
        await self._turns.next(tenant)
        if exchange.gone:
            raise ClientGoneError


def _too_costly(field: str | None) -> InvalidRequest:
    where = f"field {field!r}: " if field else ""
    return InvalidRequest(
        f"{where}the body has too many values: the maximum is {MAX_COST}, where a string counts 3, an object entry "
        "5 more, a list or an object 6, and 2 escapes or 32 bytes count 1",
        param=field,
    )
