"""Kernels in CUDA C++, for what Triton's language does not reach: registers and shared memory laid out by hand.

Each has a Triton kernel beside it, which goes on where this one does not serve: other GPUs, other formats, no NVRTC.
"""
