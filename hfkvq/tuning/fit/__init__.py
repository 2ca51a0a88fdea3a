"""Bytes of weights and caches by arithmetic, from a model's config alone."""

from .model import Plan, Weights, cache_bytes, outline_of, plan, weights_of

__all__ = ["Plan", "Weights", "cache_bytes", "outline_of", "plan", "weights_of"]
