"""Matrix products with packed bfloat16 weights.

Imported by `models.layers` and `attention`. Must not import anything of homing but `runtime`.
"""
