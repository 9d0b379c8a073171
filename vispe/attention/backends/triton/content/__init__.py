"""Fused attention with content-dependent biases: gated and decomposed."""
