"""Timing and tuning of kernels: ``hfkvq bench kernels`` and ``hfkvq bench tune``."""
