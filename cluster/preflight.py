"""Checks the settings, addresses and model folder before anything is started.

An error reported here saves a minute of loading. Checks change nothing; those that need a loaded model are done by the
replica.
"""

import errno
import importlib.util
import ipaddress
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from ..events.config import EventsSettings
from ..events.errors import BadKeys
from ..events.publish.fixed_stream import settings_problem
from ..events.security.curve_keys import reader_keys, server_keys
from ..kvcache.errors import KvCacheError
from ..replica.config import ReplicaSettings
from ..replica.errors import ModelError, StartupError, TensorParallelUnsupported
from ..replica.load.gpu_memory import check_gpu_memory
from ..replica.load.preflight import check_model
from ..router.config import RouterSettings
from ..router.errors import KeysFileInvalid, RouterError, TlsUnusable, TokenizerUnavailable, TracingUnavailable
from ..router.http.tracing import RequestSpans
from ..router.server import tls_context
from ..router.tenants.api_keys import read_tenants
from ..router.text.export import check_vocabulary
from ..router.text.template_files import read_template, try_template
from .config import Settings, replaced
from .control.autoscale import terms_of
from .errors import ModelUnavailable, PortTaken, SettingsError
from .model_source import check_runnable, model_limits, text_folder

_REMEDIES = {
    errno.EADDRINUSE: "choose another port with --port (0 takes any free one)",
    errno.EACCES: "choose a port above 1023 with --port (0 takes any free one)",
}


def exposures(settings: Settings) -> list[str]:
    """Return warnings about what the settings allow anyone on the network to do, each with its remedy."""
    router = settings.router
    if _is_loopback(router.host):
        return []
    if not router.api_keys_file and not router.api_key:
        return [
            f"anyone who can reach {router.host}:{router.port} can send requests, reset caches and read the cluster's "
            "state: set --api-keys-file, or keep --host on 127.0.0.1"
        ]
    if not router.tls_cert_file:
        return [
            f"API keys and prompts are sent to {router.host} unencrypted: set --tls-cert-file, "
            "unless a proxy in front encrypts"
        ]
    return []


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"  # any other name may resolve to a public address


def check_front(settings: RouterSettings) -> None:
    """Check the router's address, certificate, access log and tracing. Raises PortTaken and SettingsError."""
    check_port(settings.host, settings.port)
    try:
        tls_context(settings)
    except TlsUnusable as error:
        raise SettingsError(error.message) from error
    log = Path(settings.access_log)
    if settings.access_log not in ("", "-") and not log.parent.is_dir():
        raise SettingsError(f"access_log: folder {log.parent} does not exist; create it, or choose another file")
    if settings.otlp_endpoint:
        try:
            RequestSpans(settings.otlp_endpoint).close()
        except (TracingUnavailable, ValueError) as error:
            raise SettingsError(f"otlp_endpoint: {error}") from error


def check_port(host: str, port: int) -> None:
    """Check that this address can be bound. Raises PortTaken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            remedy = _REMEDIES.get(error.errno or 0, "choose an address of this machine with --host")
            raise PortTaken(host, port, error.strerror or str(error), remedy) from error


def check_bounds(settings: Settings, where: str) -> None:
    """Check that `replicas` lies within the bounds of `autoscale`. `where` begins the message. Raises SettingsError."""
    cluster = settings.cluster
    try:
        terms = terms_of(cluster)
    except ValueError as error:
        raise SettingsError(f"{where}autoscale: {error}") from error
    if terms and cluster.replicas and not max(1, terms.min_replicas) <= cluster.replicas <= terms.max_replicas:
        raise SettingsError(f"{where}replicas: {cluster.replicas} is outside autoscale {cluster.autoscale}")


def check_folder(folder: Path, settings: Settings) -> None:
    """Check that replicas and router can serve the model in this folder. Raises ModelUnavailable and SettingsError."""
    if settings.replica.engine != "homing":  # an external engine checks itself what it can run
        model_limits(folder, settings.replica, settings.served_name)
        check_text(text_folder(settings.replica, folder), settings.router)
        check_python(settings.replica)
        return
    check_runnable(folder)
    check_text(text_folder(settings.replica, folder), settings.router)
    try:
        check_model(folder, settings.replica, settings.kvcache)
    except (TensorParallelUnsupported, KvCacheError) as error:
        raise SettingsError(str(error)) from error
    except ModelError as error:
        raise ModelUnavailable(str(error)) from error
    except StartupError as error:
        raise SettingsError(str(error)) from error


def check_gpus(
    folder: Path, settings: Settings, gpu_bytes: Sequence[int], capability: tuple[int, int] | None = None
) -> None:
    """Check that the weights fit on this machine's GPUs, whose memory is `gpu_bytes`. Raises SettingsError.

    `capability`: their highest compute capability; None: unknown.
    """
    per_rank = settings.cluster.gpus_per_rank
    if not per_rank or settings.replica.engine != "homing":
        return
    utilization = settings.kvcache.gpu_memory_utilization
    try:
        # Damaged or missing weights are `check_folder`'s.
        check_gpu_memory(
            folder,
            settings.replica,
            gpu_bytes,
            capability=capability,
            gpus_per_rank=per_rank,
            utilization=utilization,
        )
    except StartupError as error:
        raise SettingsError(str(error)) from error


def check_python(settings: ReplicaSettings) -> None:
    """Check that `engine_python` is executable or, if empty, that the engine is installed. Raises SettingsError."""
    engine, python = settings.engine, settings.engine_python
    if python and not os.access(python, os.X_OK):
        raise SettingsError(f"engine_python: {python} is not executable; name a Python that has {engine}")
    if not python and importlib.util.find_spec(engine) is None:
        raise SettingsError(
            f"engine: {engine} is not installed in homing's environment; name the Python of one that has it with "
            "--engine-python"
        )


def check_tokenizer(folder: Path) -> None:
    """Check that the folder has a usable tokenizer. Raises ModelUnavailable."""
    try:
        check_vocabulary(folder)
    except TokenizerUnavailable as error:
        raise ModelUnavailable(error.message) from error


def check_text(folder: Path, settings: RouterSettings) -> None:
    """Check that the folder has a tokenizer, and that its chat template renders a chat. Raises ModelUnavailable."""
    check_tokenizer(folder)
    template_problems(folder, settings)


def template_problems(folder: Path, settings: RouterSettings) -> list[str]:
    """What the folder's chat template refuses or fails on, besides plain chats. Raises ModelUnavailable."""
    try:
        template = read_template(folder, settings.chat_template)
        return [] if template is None else try_template(template)
    except RouterError as error:
        raise ModelUnavailable(error.message) from error


def check_keys(settings: EventsSettings) -> None:
    """Check that the CURVE keys do not lock out the cluster's own router. Raises SettingsError."""
    try:
        server, reader = server_keys(settings), reader_keys(settings)
        if server is None or server.allowed is None or reader is None:
            return
        if reader.public not in server.allowed():
            raise BadKeys(Path(settings.events_curve_keys), "clients/ lacks the public half of reader.key_secret")
    except BadKeys as error:
        raise SettingsError(f"setting events_curve_keys: {error}") from error


def prepare(settings: Settings) -> Settings:
    """Check file settings and name the model. Raises SettingsError."""
    router = settings.router
    try:
        read_tenants(router.api_keys_file)
    except KeysFileInvalid as error:
        raise SettingsError(f"api_keys_file: {error.message}") from error
    if router.chat_template and not Path(router.chat_template).is_file():
        raise SettingsError(f"chat_template: no such file: {router.chat_template}")
    store = Path(router.response_store)
    if not store.parent.is_dir():
        raise SettingsError(f"response_store: folder {store.parent} does not exist; create it, or choose another file")
    history = Path(router.request_history)
    if not history.parent.is_dir():
        raise SettingsError(
            f"request_history: folder {history.parent} does not exist; create it, or choose another file"
        )
    if (problem := settings_problem(settings.events)) is not None:
        raise SettingsError(problem)
    return _named(settings)


def _named(settings: Settings) -> Settings:
    """Set `served_model_name` if it is empty: to the model's name, or to the last part of a model folder."""
    if settings.served_name or settings.models:
        return settings
    folder = Path(settings.replica.model).expanduser()
    name = folder.resolve().name if folder.is_dir() else settings.replica.model
    return replaced(settings, served_model_name=name)
