"""Requests that commands send to a router."""

import io
import re
import socket
import socketserver
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from homing.cluster.client import follow_events, get_json, post_json, read_key, router_urls, ssl_context
from homing.cluster.config import load_settings
from homing.cluster.errors import ClusterError, NotRunning, SettingsError

#: A certificate for the loopback address and its key, for tests only.
TLS = Path(__file__).parents[1] / "router" / "tls" / "server.pem"


@pytest.fixture
def router() -> Iterator[HTTPServer]:
    """Echoes the Authorization header of a POST."""

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
    """Tenants do not share cached blocks: without the key, `homing explain` would show none of the tenant's blocks."""
    url = f"http://127.0.0.1:{router.server_port}/explain"

    assert post_json(url, {}, api_key="ann") == "Bearer ann"
    assert post_json(url, {}) == "none"


def test_a_router_that_does_not_answer_is_told_with_a_remedy() -> None:
    """The message is in words: a system error number does not help."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/cluster"

        with pytest.raises(ClusterError, match="cannot be reached: Connection refused; a router that crashed restarts"):
            get_json(url)


@contextmanager
def answering(response: bytes) -> Iterator[str]:
    """The URL of a server that sends these bytes in response to anything and closes the connection."""

    class Answer(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(65536)
            self.request.sendall(response)

    with socketserver.TCPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    "response",
    [
        b"SSH-2.0-OpenSSH_9.9\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n14\r\ndata: {}\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n<p/>",
    ],
)
def test_a_broken_answer_is_an_error_in_one_line(response: bytes) -> None:
    """A router may crash while it sends, and `--url` may name another server."""
    with answering(response) as url:
        for ask in (get_json, lambda url: post_json(url, {}), lambda url: list(follow_events(url))):
            with pytest.raises(ClusterError, match=re.escape(url)):
                ask(url)


def test_a_cluster_elsewhere_is_asked_without_a_registry_entry(tmp_path: Path) -> None:
    """`--url` requires no registry entry on this machine."""
    settings = load_settings({"state_dir": str(tmp_path)}, {})

    assert router_urls(settings, "gateway:8000/") == ("http://gateway:8000",)
    with pytest.raises(NotRunning):
        router_urls(settings)


@pytest.mark.parametrize("url", ["http://", "http://[::1", "gateway:99999", "gateway:x", "file:///etc", "a\nb"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    """The message names the flag; these addresses raise different errors in different places."""
    with pytest.raises(SettingsError, match=r"--url: .* is not the address of a router"):
        router_urls(load_settings({}, {}), url)


def test_a_router_on_this_machine_is_believed_whatever_its_certificate_names(router: HTTPServer) -> None:
    """The certificate names the address for clients, while local commands use the loopback address."""
    trust = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trust.load_cert_chain(TLS)
    router.socket = trust.wrap_socket(router.socket, server_side=True)

    assert post_json(f"https://localhost:{router.server_port}/explain", {}) == "none"
    assert ssl_context("https://router.example/").verify_mode is ssl.CERT_REQUIRED


def test_a_key_comes_from_a_file_or_standard_input(tmp_path: Path) -> None:
    """A command line is visible to every user of the machine, so keys are never given there."""
    file = tmp_path / "key"
    file.write_text("sk-1\n")

    assert read_key(str(file), "--api-key-file", io.StringIO()) == "sk-1"
    assert read_key("-", "--api-key-file", io.StringIO("sk-2\n")) == "sk-2"
    assert read_key("", "backend_key_file") == ""
    with pytest.raises(SettingsError, match="backend_key_file"):
        read_key(str(tmp_path / "none"), "backend_key_file")
    with pytest.raises(SettingsError, match="backend_key_file"):
        read_key("~no-such-user/key", "backend_key_file")


@pytest.mark.parametrize("content", ["sk-1\nsk-2\n", "sk-\u2026"])
def test_a_file_that_is_no_key_is_refused_without_quoting_it(tmp_path: Path, content: str) -> None:
    """Whatever is in the file may be secret, and error messages end up in logs."""
    file = tmp_path / "key"
    file.write_text(content)

    with pytest.raises(SettingsError, match="one line of printable ASCII") as caught:
        read_key(str(file), "--api-key-file")

    assert "sk-" not in str(caught.value)
