"""Asks a running cluster's router over HTTP. No proxy, plain errors."""

import json
import ssl
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from ..config import Settings, state_folder
from ..errors import ClusterError, NotRunning
from ..registry import ClusterRegistry

TIMEOUT_S = 10.0
_REMEDY = "a router that died is back within seconds, else the output of homing serve says why"
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


def cluster_url(settings: Settings, url: str | None = None) -> str:
    """Address of the router: `url`, or that of the cluster that runs here. Raises NotRunning."""
    if url:
        return (url if "://" in url else f"http://{url}").rstrip("/")
    entry = ClusterRegistry(state_folder(settings)).running(settings.cluster.name)
    if entry.url is None:
        raise NotRunning(f"cluster {entry.name!r} is still starting (pid {entry.pid})")
    return entry.url


def router_urls(settings: Settings, url: str | None = None) -> tuple[str, ...]:
    """`url`, or the cluster's address and then that of each router where there are several. Raises NotRunning."""
    if url:
        return (cluster_url(settings, url),)
    entry = ClusterRegistry(state_folder(settings)).running(settings.cluster.name)
    return (cluster_url(settings), *entry.router_urls)


def get_json(url: str) -> Any:
    """The JSON that `url` answers. Raises ClusterError."""
    try:
        return json.loads(get_text(url))
    except ValueError as error:
        raise ClusterError(f"{url} answered no JSON: {error}") from error


def post_json(url: str, body: Any, *, api_key: str | None = None) -> Any:
    """The JSON that `url` answers to `body`. Raises ClusterError, with the router's own words where it refuses."""
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {api_key}"} if api_key else {})
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.loads(_ask(request))


def get_text(url: str) -> str:
    """What `url` answers. Raises ClusterError."""
    return _ask(urllib.request.Request(url))


def _ask(request: urllib.request.Request) -> str:
    url = request.full_url
    # A proxy of the environment has no business with an address of this cluster.
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=_trust(url))
    )
    try:
        with opener.open(request, timeout=TIMEOUT_S) as answer:
            text: str = answer.read().decode()
    except urllib.error.HTTPError as error:
        raise ClusterError(f"{url} answered {error.code} {_message(error) or error.reason}") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        words = reason.strerror or str(reason) if isinstance(reason, OSError) else str(reason)
        raise ClusterError(f"{url} cannot be asked: {words}; {_REMEDY}") from error
    return text


def _trust(url: str) -> ssl.SSLContext:
    """Whose certificates are believed: the system's; on this machine itself any, as they name the public address."""
    context = ssl.create_default_context()
    if urllib.parse.urlsplit(url).hostname in _LOOPBACK:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _message(error: urllib.error.HTTPError) -> str | None:
    """The message of an error in OpenAI's shape; None where it has another."""
    try:
        message: str = json.loads(error.read())["error"]["message"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return message


def is_ready(url: str) -> bool:
    """Whether the router at `url` would answer a request now."""
    try:
        get_json(f"{url}/ready")
    except ClusterError:
        return False
    return True
