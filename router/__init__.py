"""The router: routes requests to replicas (`routing`, `flow`, `replicas`) and serves the HTTP API (`http`).

Imported by `cluster`; must not import `cluster`, Ray or torch. The entry points are `replicas.service.RouterService`
and `server.RouterServer`.
"""
