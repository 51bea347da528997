"""The OpenAI-compatible HTTP front: an ASGI application over a `Backend`."""
