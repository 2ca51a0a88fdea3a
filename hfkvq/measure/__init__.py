"""What measures caches: the demo, divergence from bf16, benchmarks, reports, and a small model to do it with."""
