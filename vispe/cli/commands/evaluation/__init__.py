"""Commands that measure positional bias, and benchmarks."""
