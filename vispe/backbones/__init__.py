"""Frozen vision models: where their weights come from."""
