"""Evictors: which tokens leave a layer, when, and by which scores."""
