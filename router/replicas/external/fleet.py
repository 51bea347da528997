"""The external engines that a router uses, from flags, a file, DNS names and admins, and what was found out about each.

Pure state: lists in, replicas out. An engine keeps its name for as long as it is listed; names are not reused.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...backend import EngineView
from ...errors import BackendsInvalid, EngineNotFound
from .addresses import Backend
from .discovery import EngineAddress, FoundEngine
from .http_client import Address

#: The source of engines that admins add over the API.
ADMINS = "api"


@dataclass(slots=True)
class Engine:
    name: str
    address: EngineAddress
    source: str  #: see `EngineView.source`
    found: FoundEngine | None = None
    trouble: str = ""  #: why the engine could not be queried

    def view(self) -> EngineView:
        found = self.found
        return EngineView(
            name=self.name,
            url=self.address.url,
            source=self.source,
            summary=found.summary() if found else "",
            replicas=[backend.replica_id for backend in found.backends(self.name)] if found else [],
            missing=list(found.missing()) if found else [],
            trouble=self.trouble,
        )


class Fleet:
    def __init__(self) -> None:
        self.engines: dict[str, Engine] = {}
        self._named = 0

    def add(self, address: EngineAddress, source: str) -> Engine:
        """List an engine. Raises BackendsInvalid."""
        address = address.check()
        if any(engine.address.url == address.url for engine in self.engines.values()):
            raise BackendsInvalid(f"a server is named twice: {address.url}")
        engine = Engine(f"b{self._named}", address, source)
        self._named += 1
        self.engines[engine.name] = engine
        return engine

    def remove(self, url: str) -> Engine:
        """Remove an engine from the list. Raises EngineNotFound and BackendsInvalid."""
        wanted = Address.of(url).url
        for engine in self.engines.values():
            if engine.address.url == wanted:
                return self.engines.pop(engine.name)
        raise EngineNotFound(wanted)

    def replace(self, addresses: Sequence[EngineAddress], source: str) -> bool:
        """Replace a source's list; returns whether that changes anything. Raises BackendsInvalid."""
        checked = {address.url: address for address in (each.check() for each in addresses)}
        if len(checked) < len(addresses):
            raise BackendsInvalid("a server is named twice")
        present = {engine.address: engine.name for engine in self.engines.values() if engine.source == source}
        taken = {engine.address.url for engine in self.engines.values() if engine.source != source}
        fresh = [address for address in checked.values() if address not in present and address.url not in taken]
        gone = [name for address, name in present.items() if address not in checked.values()]
        for name in gone:
            del self.engines[name]
        for address in fresh:
            self.add(address, source)
        return bool(fresh or gone)

    def unheard(self) -> list[Engine]:
        return [engine for engine in self.engines.values() if engine.found is None]

    def backends(self) -> Iterable[Backend]:
        """The replicas of all engines that have answered."""
        for engine in self.engines.values():
            if engine.found is not None:
                yield from engine.found.backends(engine.name)

    def shares_host(self, engine: Engine) -> bool:
        host = Address.of(engine.address.url).host
        return any(host == Address.of(each.address.url).host for each in self.engines.values() if each is not engine)
