"""Attention with a bias that is computed for some heads and query rows at a time."""
