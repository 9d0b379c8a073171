"""Fused rotation of channel pairs (RoPE)."""
