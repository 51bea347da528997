"""Triton kernels for CUDA devices, collected in `triton_kernels`.

Imported only by `kernels.choice`. Needs torch and Triton; from homing, it must import only `kernels.base`,
`models.base` and the sampler's constants.
"""
