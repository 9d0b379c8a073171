"""Positional encodings: one file per encoding, named after it, in a folder per kind, imported on first use."""
