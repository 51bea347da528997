"""Runs step plans on a device: model runners, per-request state on the device, captured steps.

Imported by `parallel` and `server`. Must not depend on request sources, sockets or scheduling.
"""
