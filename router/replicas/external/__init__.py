"""Engines that are not ours (vLLM, SGLang): OpenAI-compatible servers that publish KV events.

Imported only by `router.replicas` and `cluster.cli.attach`.
"""
