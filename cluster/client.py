"""HTTP requests from commands to a running cluster's router."""

import http.client
import json
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from .config import Settings, state_folder
from .errors import ClusterError, NotFoundByRouter, NotRunning, SettingsError
from .registry import ClusterRegistry

TIMEOUT_S = 10.0
#: Longest time between two events of a stream.
STREAM_TIMEOUT_S = 30.0
#: Distinguishes the requests of homing's own commands from those of clients.
USER_AGENT = "homing"


def router_urls(settings: Settings, url: str | None = None) -> tuple[str, ...]:
    """Return `url`, or the cluster's URL followed by that of each router if there are several.

    Raises NotRunning, and SettingsError if `url` is none.
    """
    if url:
        return (_checked(url if "://" in url else f"http://{url}").rstrip("/"),)
    entry = ClusterRegistry(state_folder(settings)).running(settings.cluster.name)
    if entry.url is None:
        raise NotRunning(f"cluster {entry.name!r} is still starting (pid {entry.pid})")
    return (entry.url, *entry.router_urls)


def _checked(url: str) -> str:
    try:
        parts = urllib.parse.urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and url.isprintable()
    except ValueError:  # a port that is no number, an unclosed bracket
        usable = False
    if not usable:
        raise SettingsError(f"--url: {url!r} is not the address of a router, such as http://gateway:8000")
    return url


def read_key(file: str, where: str, standard_input: TextIO | None = None) -> str:
    """Read the API key in a file (`-`: standard input). Empty without a file. Error messages start with `where`."""
    if not file:
        return ""
    try:
        if standard_input is not None and file == "-":
            key = standard_input.read().strip()
        else:
            key = Path(file).expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError, RuntimeError) as error:  # RuntimeError: ~ of an unknown user
        raise SettingsError(f"{where}: cannot read {file}: {error}") from error
    # An error of the HTTP client would quote the key.
    if not (key.isascii() and key.isprintable()):
        raise SettingsError(f"{where}: {file} does not contain one key: give one line of printable ASCII")
    return key


def get_json(url: str, *, api_key: str = "") -> Any:
    return _parsed(urllib.request.Request(url, headers=_authorization(api_key)))


def delete_json(url: str, *, api_key: str = "") -> Any:
    return _parsed(urllib.request.Request(url, headers=_authorization(api_key), method="DELETE"))


def post_json(url: str, body: Any, *, api_key: str = "") -> Any:
    """POST `body`. Raises ClusterError, with the router's message if it rejects the request."""
    headers = {"content-type": "application/json"} | _authorization(api_key)
    return _parsed(urllib.request.Request(url, json.dumps(body).encode(), headers))


def get_text(url: str) -> str:
    return _open(urllib.request.Request(url))


def follow_events(url: str, api_key: str = "") -> Iterator[dict[str, Any]]:
    """Yield the data of a stream's events as they arrive. Raises ClusterError when it is unreachable or has ended."""
    request = urllib.request.Request(url, headers=_authorization(api_key))
    with _response(request, STREAM_TIMEOUT_S) as answer:
        for line in answer:
            if line.startswith(b"data: "):
                yield json.loads(line[6:])
    raise ClusterError(f"{url} has ended")


def is_ready(url: str) -> bool:
    try:
        get_json(f"{url}/ready")
    except ClusterError:
        return False
    return True


def _authorization(api_key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {api_key}"} if api_key else {}


def _parsed(request: urllib.request.Request) -> Any:
    try:
        return json.loads(_open(request))
    except ValueError as error:
        raise ClusterError(f"{request.full_url} did not return JSON: {error}") from error


def _open(request: urllib.request.Request) -> str:
    with _response(request, TIMEOUT_S) as answer:
        text: str = answer.read().decode()
    return text


@contextmanager
def _response(request: urllib.request.Request, timeout_s: float) -> Iterator[Any]:
    """Open a response. Raises ClusterError, also for errors while the body reads it."""
    url, has_key = request.full_url, request.has_header("Authorization")
    request.add_header("user-agent", USER_AGENT)
    # Ignore the environment's proxies: they must not see requests to the cluster.
    https = urllib.request.HTTPSHandler(context=ssl_context(url))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), https)
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            yield answer
    except urllib.error.HTTPError as error:
        # `explain` and `top`, the commands that call endpoints which need a key, have this flag.
        hint = "; name a file with one by --api-key-file" if error.code == 401 and not has_key else ""
        text = f"{url} returned {error.code} {_message(error) or error.reason}{hint}"
        raise (NotFoundByRouter(text) if error.code == 404 else ClusterError(text)) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        words = reason.strerror or str(reason) if isinstance(reason, OSError) else str(reason)
        raise ClusterError(
            f"{url} cannot be reached: {words}; "
            "a router that crashed restarts within seconds; otherwise see the output of homing serve"
        ) from error


def ssl_context(url: str) -> ssl.SSLContext:
    """Trust the system's CAs; for this machine, any certificate, as certificates name the public address."""
    context = ssl.create_default_context()
    if urllib.parse.urlsplit(url).hostname in ("127.0.0.1", "::1", "localhost"):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _message(error: urllib.error.HTTPError) -> str | None:
    """Return the message of an error in OpenAI's format, None for other formats."""
    try:
        message: str = json.loads(error.read())["error"]["message"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return message
