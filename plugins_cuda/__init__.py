"""CUDA kernels. None yet: build-engine refuses sm_* targets."""
