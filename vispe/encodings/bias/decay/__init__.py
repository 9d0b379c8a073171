"""Biases that decay with distance: slopes, kernels and Gaussian priors."""
