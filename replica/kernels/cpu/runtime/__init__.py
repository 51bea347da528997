"""The foundation of all CPU kernels: compilation, the code store, the thread team, call recording, LLVM helpers.

Imported by the kernels, `models`, `load`, `execute` and `cluster.control`. Must not import other folders.
"""
