"""What fits into memory: weights and caches by arithmetic, from a model's config alone."""

from .model import Plan, cache_bytes, fits, outline_of, plan
from .weights import Weights, weights_of

__all__ = ["Plan", "Weights", "cache_bytes", "fits", "outline_of", "plan", "weights_of"]
