"""Kernels for CPUs, compiled by numba when a replica starts: what stock torch takes tens of operations for."""
