"""Attention over KV pages on a CPU: decode and prefill.

Imported by `cpu_kernels`. Must not import the engine.
"""
