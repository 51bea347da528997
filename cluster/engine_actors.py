"""Engines in Ray actors that have a label, as a list that changes while the router runs: `--engines ray://…`.

    python -m homing.cluster.engine_actors GCS_ADDRESS LABEL

prints the actors that are alive and have the label, every second, until standard input is closed. It is a program of
its own because Ray's client of that table ends its process when the cluster has been away for a minute. Neither the
table nor the actors' option `_labels` is part of Ray's public interface; both are as in Ray 2.60.
"""

import select
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

import msgspec

from ..router.errors import BackendsInvalid
from ..router.replicas.external.discovery import EngineAddress

SCHEME = "ray://"
READ_S = 1.0

Labelled = tuple[str, str]  #: an actor's IP address, and the value of its label


def engine_addresses(actors: Iterable[Labelled]) -> list[EngineAddress]:
    """The engines of labelled actors: `PORT`, or `PORT.EVENTS.REPLAY` with event ports. Raises BackendsInvalid."""
    found = []
    for host, value in sorted(set(actors)):
        ports = value.split(".")
        if len(ports) not in (1, 3) or not all(port.isdecimal() for port in ports):
            raise BackendsInvalid(f"engines: an actor's label is {value!r}, not PORT or PORT.EVENTS.REPLAY")
        name = f"[{host}]" if ":" in host else host
        events, replay = [f"tcp://{name}:{port}" for port in ports[1:]] or ("", "")
        found.append(EngineAddress(f"http://{name}:{ports[0]}", events, replay))
    return found


class EngineActors:
    """The engines of a Ray cluster's labelled actors."""

    def __init__(self, url: str) -> None:
        """`url`: `ray://HOST:PORT/LABEL`, with the address of Ray's control store. Raises BackendsInvalid."""
        try:
            parts = urlsplit(url)
            label = parts.path.strip("/") if parts.hostname and parts.port else ""
        except ValueError:  # not a port, or not an IPv6 address
            label = ""
        if not label:
            raise BackendsInvalid(f"engines: {url!r} is not of the form ray://HOST:PORT/LABEL")
        self.name = url
        self._words = [sys.executable, "-P", "-m", __name__, parts.netloc, label]
        self._reader: subprocess.Popen[str] | None = None
        self._latest = self._seen = ""

    def read(self) -> list[EngineAddress] | None:
        """The engines; None: unchanged, or not known yet. Raises BackendsInvalid."""
        if self._reader is None or self._reader.poll() is not None:
            self._reader = subprocess.Popen(self._words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            threading.Thread(target=self._follow, args=(self._reader,), name="engine actors", daemon=True).start()
        if self._latest == self._seen:
            return None
        self._seen = self._latest
        return engine_addresses(msgspec.json.decode(self._seen, type=list[Labelled]))

    def close(self) -> None:
        if self._reader is not None and self._reader.stdin is not None:
            self._reader.stdin.close()
            self._reader.kill()  # without a control store to connect to, it would end only after a while
            self._reader.wait()

    def _follow(self, reader: "subprocess.Popen[str]") -> None:
        assert reader.stdout is not None
        with reader.stdout as lines:
            for line in lines:
                self._latest = line


def print_actors(address: str, label: str) -> None:
    """Print the labelled actors until standard input is closed."""
    from ray._raylet import GcsClientOptions, GlobalStateAccessor  # type: ignore[attr-defined]  # compiled
    from ray.core.generated.gcs_pb2 import ActorTableData

    options = GcsClientOptions.create(address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False)
    accessor = GlobalStateAccessor(options)
    accessor.connect()
    while not select.select([sys.stdin], [], [], READ_S)[0]:
        actors = [ActorTableData.FromString(each) for each in accessor.get_actor_table(None, "ALIVE")]
        labelled = [(each.address.ip_address, each.labels[label]) for each in actors if label in each.labels]
        print(msgspec.json.encode(sorted(labelled)).decode(), flush=True)


def main(words: Sequence[str]) -> None:
    print_actors(*words)


if __name__ == "__main__":
    main(sys.argv[1:])
