"""Decode steps whose state stays on the device: the request table, whole-step graphs, steps launched ahead."""
