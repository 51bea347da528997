"""Other engines behind this router: OpenAI-compatible servers that publish KV events (vLLM, SGLang)."""
