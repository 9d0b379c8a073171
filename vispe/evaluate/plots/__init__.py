"""Pictures of encodings and of positions."""
