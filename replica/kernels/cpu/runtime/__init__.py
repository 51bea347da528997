"""What all CPU kernels build on: compilation, the code store, the thread team, call recording, LLVM helpers."""
