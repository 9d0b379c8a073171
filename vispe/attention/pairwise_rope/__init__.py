"""Logits of rotary attention in which a pair of tokens decides how far both are turned."""
