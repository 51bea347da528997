"""Attention over KV pages on a CPU: decode and prefill."""
