"""Model files: reading, writing and validation."""
