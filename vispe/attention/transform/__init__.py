"""Transforms of queries, keys, values and the attention output."""
