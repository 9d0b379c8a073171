"""Fused attention for tokens at arbitrary coordinates."""
