"""Fused attention for tokens at arbitrary coordinates, and for packed sequences."""
