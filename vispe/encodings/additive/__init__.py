"""Additive encodings: a vector per position, added to the tokens."""
