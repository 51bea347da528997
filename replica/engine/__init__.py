"""The engine: request state, scheduling and sampling, one step at a time.

Imported by `server`, `parallel` and `execute`. Must not import sockets or Ray;
the scheduler and the step plan need no torch.
"""
