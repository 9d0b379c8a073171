"""Kind bias: something that depends on two places is added to the logits of attention."""
