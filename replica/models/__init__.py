"""Models behind one interface (`base.Model`): our decoder for the common families, transformers' code for the rest.

Imported by `execute`; `kernels` and `attention` may import only `base` and `spec`. Must not depend on requests, the KV
pool or attention backends. `spec` needs no torch.
"""
