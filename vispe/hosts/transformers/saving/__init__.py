"""Saving and loading of converted models of transformers."""
