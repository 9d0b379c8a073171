"""Measures of positional and rotational bias."""
