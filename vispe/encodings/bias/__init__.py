"""Attention biases: a term per pair of positions, added to the attention logits."""
