"""Measures that read attention."""
