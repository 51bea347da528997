"""The router: routes requests to replicas (`routing`, `flow`, `replicas`) and serves the HTTP API (`http`).

Imported by `cluster`; must not import it, nor Ray or torch. `replicas.service.RouterService` and `server.RouterServer`
are the entry points.
"""
