"""Kernels compiled for CPUs by numba, collected in `cpu_kernels`.

Imported by `kernels.choice`, `attention` and `execute`. `processor` and `runtime.processor` need no torch.
"""
