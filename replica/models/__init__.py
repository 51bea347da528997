"""Models behind one contract (`base.Model`): our decoder for the common families, transformers' code for the rest.

Imported by `execute`; `kernels` and `attention` may import `base` and `spec` alone. Must not know requests, the KV pool
or attention backends. `spec` needs no torch.
"""
