"""Rotary embedding of coordinates: angles, rotations and layouts of channels."""
