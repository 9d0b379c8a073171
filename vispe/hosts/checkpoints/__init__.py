"""Conversion of released checkpoints to the parameter names of vispe."""
