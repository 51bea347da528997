"""Device kernels of a decoder step behind one interface: plain torch (`base`), Triton, compiled for the CPU.

Imported by `attention`, `models` and `execute`. Imports `models.base` and the sampler; must not know the KV pool or
attention backends. `base` and `choice` need neither Triton nor numba; the kernels do.
"""
