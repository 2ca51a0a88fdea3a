"""Whole models, random weights: prefill, decode and ``generate`` with our caches and stock ones (`bench generate`)."""
