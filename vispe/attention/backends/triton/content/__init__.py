"""Fused attention for biases that depend on content: gated and decomposed."""
