"""Benchmarks and tuning of the decode kernels: ``hfkvq bench kernels`` and ``hfkvq bench tune``."""
