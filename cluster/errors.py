"""What can go wrong when a cluster is set up or asked about, and whose fault it is.

    ClusterError
    ├── SettingsError        the user's: an unknown or malformed setting; says which, where it stands and what is near
    ├── ModelUnavailable     the user's: no such folder or model on the hub, no way to get there, or a torn folder
    ├── PortTaken            the user's: nobody can listen on the wanted address, mostly as another program does
    ├── AlreadyRunning       the user's: a cluster of this name runs on this machine
    ├── NotRunning           the user's: no cluster of this name runs on this machine
    ├── DoesNotFit           the user's: the machine or cluster lacks the CPUs or GPUs that the settings ask for
    ├── StartFailed          a replica or the router could not start; carries its own message
    ├── StopFailed           the cluster did not end in time
    ├── NoSuchModel          the user's: no model of this name runs, or several do and none is named
    ├── NoSuchReplica        the user's: no replica of this name runs
    ├── UpdateAbandoned      replicas could not start with the changed settings; those before still serve
    ├── LogUnreadable        the user's: a line of a request log is malformed; says which line and which field
    └── PlotFailed           the user's: a plot cannot be written, has an unknown suffix, or matplotlib is missing

`exit_code` is what the command line ends with; the message is all that it prints.
"""
# ruff: noqa: N818 - these names say what happened; a user reads them without "Error".

from typing import ClassVar


class ClusterError(Exception):
    """Anything that the command line reports by name, without a traceback."""

    http_status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1


class SettingsError(ClusterError):
    """A setting that does not exist or does not hold a valid value."""

    http_status = 400
    exit_code = 2


class ModelUnavailable(ClusterError):
    """The model is neither here nor to be had, or what is here is not whole."""

    http_status = 404
    exit_code = 2


class PortTaken(ClusterError):
    """The wanted address cannot be bound."""

    exit_code = 2

    def __init__(self, host: str, port: int, reason: str, remedy: str) -> None:
        super().__init__(f"cannot listen on {host}:{port}: {reason}; {remedy}")


class AlreadyRunning(ClusterError):
    """A cluster of this name runs already."""

    exit_code = 2


class NotRunning(ClusterError):
    """No cluster of this name runs."""

    http_status = 404


class DoesNotFit(ClusterError):
    """What is asked for exceeds what there is."""

    exit_code = 2


class StartFailed(ClusterError):
    """A part of the cluster could not start."""


class StopFailed(ClusterError):
    """A part of the cluster did not end."""


class NoSuchModel(ClusterError):
    """A model that is to be scaled does not run here, or is not named beside others."""

    http_status = 404
    exit_code = 2


class NoSuchReplica(ClusterError):
    """A replica that is to be drained does not exist."""

    http_status = 404
    exit_code = 2


class UpdateAbandoned(ClusterError):
    """No replica came up with the changed settings."""


class LogUnreadable(ClusterError):
    """A log of requests that cannot be opened, or a line that cannot be read."""

    http_status = 400
    exit_code = 2


class PlotFailed(ClusterError):
    """A plot cannot be drawn or written; said before the work begins where it can be known."""

    http_status = 400
    exit_code = 2
