"""Policies of other routers, from their documentation and sources of November 2026.

For comparison in `homing simulate` and on a real cluster (`homing serve --policy sglang`). Each keeps the books that
its original keeps; facts and versions: docs/simulate.md. Same rules for imports as `policy`.
"""
