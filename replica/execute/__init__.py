"""Runs step plans on a device: the model runners, request state on the device, captured steps.

Imported by `parallel` and `server`. Must not know the sources of requests, sockets or scheduling.
"""
