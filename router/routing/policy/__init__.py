"""Routing policies behind one protocol, and the registry that names them.

Imported by `routing.placement`, settings, simulator and docs. A policy is one file here.
"""
