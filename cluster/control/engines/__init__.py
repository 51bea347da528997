"""vLLM or SGLang as a replica: its command line, its process, and the process that leaves nothing of it behind.

Imported by `cluster.control` and `cluster.devices`. Must not import Ray; `command` is pure, `reaper` runs on its own.
"""
