"""What all CPU kernels stand on: compilation, the code cache, the thread team, call recording, LLVM helpers."""
