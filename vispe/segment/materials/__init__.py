"""Stereology of label maps: intercepts, grain size, interfaces, correlation, elongation."""
