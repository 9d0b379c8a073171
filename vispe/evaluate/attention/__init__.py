"""Measures of attention."""
