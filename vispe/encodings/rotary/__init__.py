"""Rotary encodings: position-dependent transforms of queries and keys."""
