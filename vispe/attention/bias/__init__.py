"""The closed vocabulary of biases: what is added to the logits, as a description that backends read."""
