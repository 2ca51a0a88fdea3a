"""Benchmarks and tuning: ``hfkvq bench kernels``, ``hfkvq bench tune``, and whole models, ``hfkvq bench generate``."""
