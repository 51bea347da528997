"""The engine: scheduling, sampling and the life of a request, one step at a time.

Imported by `server`, `parallel` and `execute`. Must not import sockets or Ray;
the scheduler and the step plan need no torch.
"""
