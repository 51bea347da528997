"""Where a request goes: which replica holds which prefix, how busy it is, what a prefill costs, and the policies.

Pure state, shared with the simulator. Must not import `flow`, `replicas`, `http` or sockets.
"""
