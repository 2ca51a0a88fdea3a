"""Measurements of caches: the demo, divergence from bf16, the doctor, a kernel bench, and a small model."""
