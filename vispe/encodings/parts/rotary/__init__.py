"""Frequencies, angles and generators shared by rotary encodings."""
