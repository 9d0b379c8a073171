"""Rotary embeddings with frequencies per axis of the grid."""
