"""One replica: the engine, its models, and the messages that it exchanges with routers.

`cluster` may import all of it, `router` only `replica.messages`. Must not import `router`, `cluster` or Ray. Importing
this package loads no torch.
"""
