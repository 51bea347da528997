"""What a model writes as text, taken apart: content, reasoning and tool calls, while the text arrives.

Imported by `http`. Pure state: must not import the other folders of the router, a tokenizer, HTTP, sockets or clocks.
"""
