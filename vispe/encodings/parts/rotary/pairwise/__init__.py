"""Rotary logits whose rotation angles depend on the pair of tokens (SelfExtend, PINE)."""
