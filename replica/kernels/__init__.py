"""Device kernels for a decoder step behind one interface: plain torch (`base`), Triton, and numba on CPUs.

Imported by `attention`, `models` and `execute`. Imports `models.base` and the sampler; must not depend on the KV pool
or attention backends. `base` and `choice` need neither Triton nor numba; the kernels do.
"""
