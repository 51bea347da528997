"""Structured output: from a request's constraint to the tokens that it allows at each position, with llguidance.

What a constraint means is in `messages.grammar`, as routers check constraints too. Imported by `server` and `engine`.
Must not know requests, scheduling, sockets or the model.
"""
