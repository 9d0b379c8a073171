"""Contiguous runs of bias tables, the memory layout of the fused kernels and of blocks on the CPU."""
