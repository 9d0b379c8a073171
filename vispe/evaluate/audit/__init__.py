"""Audit of a model: all measures in one pass, with controls, confidence intervals and an HTML report."""
