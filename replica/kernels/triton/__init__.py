"""Triton kernels for CUDA devices, collected in `triton_kernels`.

Imported only by `kernels.choice` and `attention`.
Each needs torch and Triton, nothing else of homing but `kernels.base`.
"""
