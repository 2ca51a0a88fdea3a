"""Attention functions that Transformers finds under the name "hfkvq"."""
