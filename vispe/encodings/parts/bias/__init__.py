"""Slopes, priors, buckets and tables shared by attention biases."""
