"""CPU kernels, compiled by numba and collected in `cpu_kernels`.

Imported by `kernels.choice`, `models.layers` (products) and `execute` (call recording). `runtime.processor` needs no
torch.
"""
