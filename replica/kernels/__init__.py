"""Device kernels of a decoder step behind one protocol (`base`): Triton, compiled for the CPU, and plain torch.

Imported by `attention`, `models` and `execute`. Imports `models.base` and the sampler; must not know the KV pool or
attention backends. `base`, `torch_kernels` and `choice` need neither Triton nor numba; the kernels do.
"""
