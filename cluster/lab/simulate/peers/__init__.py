"""Policies of other routers, reimplemented from their documentation and sources as of November 2026.

For comparison in `homing simulate`. Each keeps the same state as its original; see docs/compare.md for facts and
versions. May import `router.routing`.
"""
