"""Splits a model's text into content, reasoning and tool calls while it arrives.

Imported by `http`. Pure state: must not import other folders of the router, a tokenizer, HTTP, sockets or clocks.
"""
