"""Fused attention with one bias table for all tokens of a full grid."""
