"""A discrete-event simulation of routing: the production placement and policies over modelled replicas.

Virtual time, no sockets, no tokens. Imported by `homing simulate` (command.py), benchmarks and tests only.
"""

from .delivery import Channel
from .replica import ReplicaLimits, SimulatedReplica
from .results import Result
from .runs import ORACLE, Setup, capacity_per_s, policy_names, replica_of, result_of, run, simulation_of
from .simulation import Fault, Simulation
from .step_times import MockerModel, RateModel, StepTimes
from .workload import Arrival, compress, facts, from_trace

__all__ = [
    "ORACLE",
    "Arrival",
    "Channel",
    "Fault",
    "MockerModel",
    "RateModel",
    "ReplicaLimits",
    "Result",
    "Setup",
    "SimulatedReplica",
    "Simulation",
    "StepTimes",
    "capacity_per_s",
    "compress",
    "facts",
    "from_trace",
    "policy_names",
    "replica_of",
    "result_of",
    "run",
    "simulation_of",
]
