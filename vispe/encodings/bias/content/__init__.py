"""Biases that depend on the content of tokens or on the logits."""
