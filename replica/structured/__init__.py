"""Structured output: from a request's constraint to the tokens that it allows at each position, with llguidance.

`grammar` translates a constraint and is imported by `router.text`, too; it needs no tokenizer. `guide` follows one
answer. Imported by `server` and `engine`. Must not know requests, scheduling, sockets or the model.
"""
