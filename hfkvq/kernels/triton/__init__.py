"""Triton kernels and their launchers, one module an operation; imported when first needed."""
