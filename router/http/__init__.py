"""The OpenAI-compatible HTTP front over a `Backend`: an HTTP/1.1 server of our own, and the endpoints behind it."""
