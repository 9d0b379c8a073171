"""Conversion of a model: checks, plan, replacement of classes, restoration and description."""
