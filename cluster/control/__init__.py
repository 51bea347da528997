"""The control plane on Ray: the controller and its planner, rank groups, router processes, the supervisor.

Imported by `cli.serve`. `planner`, `autoscale`, `fleets` and the other pure modules must not import Ray.
"""
