"""Measures that read features."""
