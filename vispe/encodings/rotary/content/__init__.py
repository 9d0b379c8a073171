"""Rotary embeddings and calibrations that depend on the content or the number of tokens."""
