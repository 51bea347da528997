"""Structured output: computes with llguidance which tokens a request's constraint allows at each position.

`messages.grammar` defines what a constraint means, since routers check constraints too. Imported by `server` and
`engine`. Must not depend on requests, scheduling, sockets or the model.
"""
