"""Fused rotation of pairs."""
