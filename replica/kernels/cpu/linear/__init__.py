"""Matrix products with packed bfloat16 weights."""
