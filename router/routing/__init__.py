"""Where a request goes: which replica holds which prefix, its load, what a prefill costs, and the policies.

Pure state. Imported by `flow`, `replicas` and the simulator. Must not import these, `http`, sockets or clocks.
"""
