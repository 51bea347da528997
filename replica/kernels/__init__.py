"""Device kernels of a decoder step: one file per family, with plain torch beside them behind one protocol (`base`).

Importing this package, `base`, `fallback` or `choice` needs no Triton; the files with kernels do.
"""
