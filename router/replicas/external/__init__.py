"""External engines (vLLM, SGLang): OpenAI-compatible servers that publish KV events.

Imported only by `router.replicas.service`, `cluster.cli.route` and `cluster.control.engines`; must not import
`router.http`.
"""
