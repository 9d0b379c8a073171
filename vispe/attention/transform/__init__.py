"""The closed vocabulary of transforms of queries, keys, values and output."""
