"""What can be wrong with a simulation that was asked for.

ValueError
└── SimulationError          the arguments, the trace or the scenario; says which and what to do
"""


class SimulationError(ValueError):
    """A simulation that cannot be run as it was asked for."""
