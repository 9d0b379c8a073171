"""Measurements of positional and rotational bias."""
