"""A discrete-event simulation of routing: the production placement over modelled replicas, beside peers' policies.

Virtual time, no sockets, no tokens. `homing simulate` is its command line (cluster/lab/simulate/command.py).
"""

from .delivery import Channel
from .errors import SimulationError
from .models import MockerModel, RateModel, ReplicaModel
from .replica import ReplicaLimits, SimulatedReplica
from .results import Result
from .runs import ORACLE, OWN_POLICIES, Setup, capacity_per_s, policy_names, result_of, run, simulation_of
from .simulation import Simulation
from .workload import Arrival, compress, facts, from_trace

__all__ = [
    "ORACLE",
    "OWN_POLICIES",
    "Arrival",
    "Channel",
    "MockerModel",
    "RateModel",
    "ReplicaLimits",
    "ReplicaModel",
    "Result",
    "Setup",
    "SimulatedReplica",
    "Simulation",
    "SimulationError",
    "capacity_per_s",
    "compress",
    "facts",
    "from_trace",
    "policy_names",
    "result_of",
    "run",
    "simulation_of",
]
