"""Fused attention with a bias table: forward and backward passes without an n x n tensor (CUDA)."""
