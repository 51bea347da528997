"""One replica: the engine, its models, and the messages that it exchanges with routers.

`cluster` may import any part of it, `router` only `replica.messages`. Must not import `router`, `cluster` or Ray.
Importing this package does not load torch.
"""
