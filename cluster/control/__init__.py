"""The control plane on Ray: the controller and its planner, rank groups, router processes, the supervisor.

Imported by `cluster.cli`, `cluster.devices`, `cluster.lab.simulate` and `cluster.preflight`. `planner`, `fleets`,
`autoscale` and `diagnosis` must not import Ray.
"""
