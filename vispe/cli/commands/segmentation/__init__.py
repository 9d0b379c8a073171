"""Commands that segment micrographs."""
