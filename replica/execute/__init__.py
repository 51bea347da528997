"""Runs step plans on a device: the model runner, device-resident request state, captured steps.

Imported by `parallel` and `server`. Must not know requests' owners, sockets or scheduling.
"""
