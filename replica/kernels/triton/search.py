"""How deep the kernels' binary searches over rows go. Steps beyond what is needed find what is found already."""

#: A depth is a constant of a compiled kernel, and each takes seconds to compile: so depths come in these steps.
DEPTH_STEP = 4


def depth_for(rows: int) -> int:
    """Halvings that single out one of `rows` rows, rounded up."""
    return -(-max(1, rows.bit_length()) // DEPTH_STEP) * DEPTH_STEP
