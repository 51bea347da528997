"""A minimal router for subscriber tests: a server that lists replicas at /cluster."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import msgspec

from homing.events import EventEndpoints


class Listing:
    """The content of /cluster, which tests change."""

    def __init__(self) -> None:
        self._replicas: dict[str, tuple[int, EventEndpoints | None]] = {}

    def put(self, replica: str, epoch: int, endpoints: EventEndpoints | None) -> None:
        """Add or replace a replica."""
        self._replicas[replica] = epoch, endpoints

    def drop(self, replica: str) -> None:
        """Remove a replica."""
        del self._replicas[replica]

    def view(self) -> dict[str, Any]:
        """The JSON response of /cluster."""
        return {
            "replicas": [
                {"replica_id": name, "epoch": epoch, "event_endpoints": msgspec.to_builtins(endpoints)}
                for name, (epoch, endpoints) in self._replicas.items()
            ]
        }


@contextmanager
def serving(listing: Listing) -> Iterator[str]:
    """Start a server that answers every path with the listing; yields its URL."""

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
