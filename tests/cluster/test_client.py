"""What commands send to a router."""

import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from homing.cluster.client import _trust, post_json

#: A certificate for the loopback, and its key: for tests alone.
TLS = Path(__file__).parents[1] / "router" / "tls" / "server.pem"


@pytest.fixture
def router() -> Iterator[HTTPServer]:
    """Answers a POST with its Authorization header."""

    class Echo(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'"%s"' % (self.headers["authorization"] or "none").encode())

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Echo)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_question_is_asked_in_the_name_of_a_key(router: HTTPServer) -> None:
    """Tenants do not share cached blocks: without the key, `homing explain` would speak of nobody's."""
    url = f"http://127.0.0.1:{router.server_port}/explain"

    assert post_json(url, {}, api_key="ann") == "Bearer ann"
    assert post_json(url, {}) == "none"


def test_a_router_on_this_machine_is_believed_whatever_its_certificate_names(router: HTTPServer) -> None:
    """It names the address that clients use, which the commands of this machine do not."""
    trust = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trust.load_cert_chain(TLS)
    router.socket = trust.wrap_socket(router.socket, server_side=True)

    assert post_json(f"https://localhost:{router.server_port}/explain", {}) == "none"
    assert _trust("https://router.example/").verify_mode is ssl.CERT_REQUIRED
