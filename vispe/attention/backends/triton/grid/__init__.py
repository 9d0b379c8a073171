"""Fused attention with one table for all tokens of a full grid."""
