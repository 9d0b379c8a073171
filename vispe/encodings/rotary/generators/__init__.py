"""Rotations by learned or geometric generators, such as Lie groups and cameras."""
