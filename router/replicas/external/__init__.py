"""External engines (vLLM, SGLang): OpenAI-compatible servers that publish KV events.

Imported only by `router.replicas.service` and `cluster.cli.attach`. Must not import `router.http`.
"""
