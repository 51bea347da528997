"""What `homing serve` can know to be impossible before it starts anything: addresses, bounds, the model's folder.

Better now than after a minute of loading. Looks, changes nothing; what only a loaded model tells is the replica's.
"""

import errno
import socket
from pathlib import Path

from ..kvcache.errors import KvCacheError
from ..replica.errors import StartupError
from ..replica.load.preflight import check_model
from ..replica.models.errors import UnsupportedModel, WeightsMissing, WeightsTorn
from ..router.config import RouterSettings
from ..router.errors import TlsUnusable, TokenizerUnavailable
from ..router.server import tls_context
from ..router.text.export import check_vocabulary
from .config import Settings
from .control.autoscale import terms_of
from .errors import ModelUnavailable, PortTaken, SettingsError

_REMEDIES = {
    errno.EADDRINUSE: "choose another port with --port (0 takes any free one)",
    errno.EACCES: "choose a port above 1023 with --port (0 takes any free one)",
}


def check_front(settings: RouterSettings) -> None:
    """A router could listen, encrypt and log as the settings want it. Raises PortTaken and SettingsError."""
    check_port(settings.host, settings.port)
    try:
        tls_context(settings)
    except TlsUnusable as error:
        raise SettingsError(error.message) from error
    log = Path(settings.access_log)
    if settings.access_log not in ("", "-") and not log.parent.is_dir():
        raise SettingsError(f"access_log: there is no folder {log.parent}; make it, or choose another file")


def check_port(host: str, port: int) -> None:
    """Raises PortTaken when nobody could listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            remedy = _REMEDIES.get(error.errno or 0, "choose an address of this machine with --host")
            raise PortTaken(host, port, error.strerror or str(error), remedy) from error


def check_bounds(settings: Settings, where: str) -> None:
    """Replicas are within what autoscaling allows. `where`: whose settings they are, before the message.

    Raises SettingsError.
    """
    cluster = settings.cluster
    try:
        terms = terms_of(cluster)
    except ValueError as error:
        raise SettingsError(f"{where}autoscale: {error}") from error
    if terms is not None and not max(1, terms.least) <= cluster.replicas <= terms.most:
        words = f"{cluster.replicas} are wanted at first, autoscale allows {cluster.autoscale}"
        raise SettingsError(f"{where}replicas: {words}")


def check_folder(folder: Path, settings: Settings) -> None:
    """Replicas and router could serve the model in this folder. Raises ModelUnavailable and SettingsError."""
    check_tokenizer(folder)
    try:
        check_model(folder, settings.replica, settings.kvcache)
    except (WeightsMissing, WeightsTorn, UnsupportedModel) as error:
        raise ModelUnavailable(str(error)) from error
    except (StartupError, KvCacheError) as error:
        raise SettingsError(str(error)) from error


def check_tokenizer(folder: Path) -> None:
    """There are words to speak. Raises ModelUnavailable."""
    try:
        check_vocabulary(folder)
    except TokenizerUnavailable as error:
        raise ModelUnavailable(error.message) from error
