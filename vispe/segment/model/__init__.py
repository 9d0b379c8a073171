"""Model files: what is in them, and what is refused."""
