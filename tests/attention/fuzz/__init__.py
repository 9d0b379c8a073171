"""Random calls of attention against definitions in float64. `python -m tests.attention.fuzz` runs many seeds."""
