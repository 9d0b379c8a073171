"""Converted models on disk and in configurations of transformers."""
