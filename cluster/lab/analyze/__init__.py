"""`homing analyze`: estimates the value of prefix caching from a log of requests.

Imported by the command line and `simulate`. Must not import `simulate` or `cluster.control`.
"""
