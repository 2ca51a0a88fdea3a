"""Divergence of a scheme's predictions from the stock cache's, on the same tokens: ``hfkvq kld``."""

from .measurement import Bill, Divergence, Measured, Perplexity, compare_logits, measure

__all__ = ["Bill", "Divergence", "Measured", "Perplexity", "compare_logits", "measure"]
