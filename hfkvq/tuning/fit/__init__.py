"""What fits into memory: weights and caches by arithmetic, from a model's config alone."""

from .model import Plan, cache_bytes, fits, outline_of, parse_size, plan
from .weights import Weights, weights_of

__all__ = ["Plan", "Weights", "cache_bytes", "fits", "outline_of", "parse_size", "plan", "weights_of"]
