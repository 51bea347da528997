"""The external engines that a router uses, from flags, a file, DNS names and admins, and what was found out about each.

Pure state: lists in, replicas out. An engine keeps its name for as long as it is listed; names are not reused.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import msgspec

from ...backend import EngineView
from ...errors import EngineNotFound
from .addresses import ReplicaAddress, check_distinct
from .discovery import EngineAddress, EngineInfo
from .http_client import Address

#: The source of engines that admins add over the API.
API_SOURCE = "api"


@dataclass(slots=True)
class ListedEngine:
    name: str
    address: EngineAddress
    source: str  #: see `EngineView.source`
    info: EngineInfo | None = None
    trouble: str = ""  #: why the engine could not be queried

    def view(self) -> EngineView:
        info = self.info
        return EngineView(
            name=self.name,
            url=self.address.url,
            source=self.source,
            summary=info.summary() if info else "",
            replicas=[each.replica_id for each in info.replica_addresses(self.name)] if info else [],
            missing=list(info.missing()) if info else [],
            trouble=self.trouble,
        )


class EngineFleet:
    def __init__(self) -> None:
        self.engines: dict[str, ListedEngine] = {}
        self._next_number = 0

    def encode(self) -> bytes:
        """The list as one line, for `of`; without what was found out about the engines."""
        return msgspec.json.encode([(each.address, each.source) for each in self.engines.values()])

    @classmethod
    def of(cls, encoded: bytes) -> Self:
        """The fleet of an encoded list."""
        fleet = cls()
        for address, source in msgspec.json.decode(encoded, type=list[tuple[EngineAddress, str]]):
            fleet.add(address, source)
        return fleet

    def add(self, address: EngineAddress, source: str) -> ListedEngine:
        """List an engine. Raises BackendsInvalid."""
        address = address.check()
        check_distinct([address.url, *(engine.address.url for engine in self.engines.values())])
        engine = ListedEngine(f"b{self._next_number}", address, source)
        self._next_number += 1
        self.engines[engine.name] = engine
        return engine

    def remove(self, url: str) -> ListedEngine:
        """Remove an engine from the list. Raises EngineNotFound and BackendsInvalid."""
        wanted = Address.of(url).url
        for engine in self.engines.values():
            if engine.address.url == wanted:
                return self.engines.pop(engine.name)
        raise EngineNotFound(wanted)

    def replace(self, addresses: Sequence[EngineAddress], source: str) -> bool:
        """Replace a source's list; returns whether that changes anything. Raises BackendsInvalid."""
        checked = [address.check() for address in addresses]
        check_distinct([address.url for address in checked])
        present = {engine.address: engine.name for engine in self.engines.values() if engine.source == source}
        taken = {engine.address.url for engine in self.engines.values() if engine.source != source}
        fresh = [address for address in checked if address not in present and address.url not in taken]
        gone = [name for address, name in present.items() if address not in checked]
        for name in gone:
            del self.engines[name]
        for address in fresh:
            self.add(address, source)
        return bool(fresh or gone)

    def is_from_operator(self, url: str) -> bool:
        """Whether a flag, file or name of the operator lists this server, not an admin over the API."""
        return any(each.address.url == url and each.source != API_SOURCE for each in self.engines.values())

    def undiscovered(self) -> list[ListedEngine]:
        return [engine for engine in self.engines.values() if engine.info is None]

    def replica_addresses(self) -> Iterable[ReplicaAddress]:
        """The replicas of all engines that have answered."""
        for engine in self.engines.values():
            if engine.info is not None:
                yield from engine.info.replica_addresses(engine.name)

    def shares_host(self, engine: ListedEngine) -> bool:
        host = Address.of(engine.address.url).host
        return any(host == Address.of(each.address.url).host for each in self.engines.values() if each is not engine)
