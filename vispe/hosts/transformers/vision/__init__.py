"""Encodings in vision models and vision towers of transformers."""
