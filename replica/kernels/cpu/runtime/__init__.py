"""The foundation of all CPU kernels: compilation, the code store, the thread team, call recording, LLVM helpers."""
