"""CPU kernels, compiled by numba and collected in `cpu_kernels`.

Imported by `kernels.choice`, `models.layers` (products), `execute` (call recording) and `cluster.control` (compilation
ahead). Must not import the engine; `runtime.processor` must not import torch.
"""
