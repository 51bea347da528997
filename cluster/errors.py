"""Errors of the cluster and their causes.

    ClusterError
    ├── StartFailed          a replica or the router could not start; carries its own message
    ├── StopFailed           the cluster did not stop in time
    ├── EngineLost           a replica's external engine exited or hangs
    ├── UpdateAbandoned      no replica could start with the changed settings; the old replicas still serve
    ├── RayLost              a process of the local Ray exited, which stops the whole cluster
    ├── NotFoundByRouter     the router does not have what the command asks for
    ├── NotRunning           no cluster of this name runs on this machine
    └── UserError            the command or its settings are wrong (exit code 2)
        ├── SettingsError      an unknown or malformed setting; names it, its source and the nearest spelling
        ├── ModelUnavailable   the model was not found locally or on the hub, or its folder is damaged
        ├── PortTaken          the router cannot listen on its address
        ├── AlreadyRunning     a cluster of this name already runs on this machine
        ├── DoesNotFit         the settings ask for more GPUs than the machine has
        ├── NoSuchModel        the model is not served, or several are and the command names none
        ├── OrderRefused       the controller refuses an order, such as to drain an unknown replica
        ├── ExtraMissing       the command needs packages that a plain installation does not have
        ├── NoSuchLog          no part of the cluster has this name, or nothing was logged
        ├── LogUnreadable      a line of a request log is malformed; names the line and the field
        └── PlotFailed         unknown suffix, unwritable file, or matplotlib is missing

The command line prints the message and exits with `exit_code`.
"""
# ruff: noqa: N818 - the names already say what went wrong; an "Error" suffix would add nothing.

from typing import ClassVar


class ClusterError(Exception):
    """An error that the command line reports in one line, without a traceback."""

    exit_code: ClassVar[int] = 1


class StartFailed(ClusterError): ...


class StopFailed(ClusterError): ...


class EngineLost(ClusterError): ...


class UpdateAbandoned(ClusterError): ...


class RayLost(ClusterError): ...


class NotFoundByRouter(ClusterError): ...


class NotRunning(ClusterError): ...


class UserError(ClusterError):
    exit_code = 2


class SettingsError(UserError): ...


class ModelUnavailable(UserError): ...


class PortTaken(UserError):
    def __init__(self, host: str, port: int, reason: str, remedy: str) -> None:
        super().__init__(f"cannot listen on {host}:{port}: {reason}; {remedy}")


class AlreadyRunning(UserError): ...


class DoesNotFit(UserError): ...


class NoSuchModel(UserError): ...


class OrderRefused(UserError): ...


class ExtraMissing(UserError):
    def __init__(self) -> None:
        super().__init__("this needs the extra: pip install 'homing[serve]', or in a clone '.[serve]'")


class NoSuchLog(UserError): ...


class LogUnreadable(UserError): ...


class PlotFailed(UserError): ...
