"""Fused attention with content-dependent biases: kernels of decomposed ones, and dispatch."""
