"""The three-cell benchmark: which encodings can tell a placement."""
