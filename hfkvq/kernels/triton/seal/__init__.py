"""Seal on the GPU: pages with a scale a channel (`channel`), tokens one by one (`token`), and their launches."""

from .launch import seal_triton, seal_wanted

__all__ = ["seal_triton", "seal_wanted"]
