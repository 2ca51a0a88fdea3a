"""Measurements of caches: the demo, divergence from bf16, the doctor, and a small model."""
