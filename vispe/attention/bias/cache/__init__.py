"""Caches of masks and strips of learned biases."""
