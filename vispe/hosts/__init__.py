"""Conversion of existing models to other positional encodings; one folder per library."""
