"""Figures and HTML report of the probe."""
