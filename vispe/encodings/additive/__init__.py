"""Kind additive: something that depends on the place is added to tokens."""
