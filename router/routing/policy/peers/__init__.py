"""Policies of other routers, reimplemented from their documentation and sources as of November 2026.

For comparison in `homing simulate` and on a real cluster (`homing serve --policy sglang`). Each keeps the same state as
its original; see docs/compare.md for facts and versions. Imported and restricted as `policy` is: a policy
must not import `flow`, `replicas` or `http`.
"""
