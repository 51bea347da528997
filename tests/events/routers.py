"""A router as far as subscribers know one: it lists replicas at /cluster."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import msgspec

from homing.events import EventEndpoints


class Listing:
    """What /cluster answers; tests change it."""

    def __init__(self) -> None:
        self._replicas: dict[str, tuple[int, EventEndpoints | None]] = {}

    def put(self, replica: str, epoch: int, endpoints: EventEndpoints | None) -> None:
        """From now on this replica is there."""
        self._replicas[replica] = epoch, endpoints

    def drop(self, replica: str) -> None:
        """From now on it is not."""
        del self._replicas[replica]

    def view(self) -> dict[str, Any]:
        """The answer."""
        return {
            "replicas": [
                {"replica_id": name, "epoch": epoch, "event_endpoints": msgspec.to_builtins(endpoints)}
                for name, (epoch, endpoints) in self._replicas.items()
            ]
        }


@contextmanager
def serving(listing: Listing) -> Iterator[str]:
    """The address of a server that answers any path with the listing."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = msgspec.json.encode(listing.view())
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
