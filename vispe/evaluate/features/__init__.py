"""Measures of features."""
