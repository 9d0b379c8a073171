"""Modules of `dinov2.py`: images, metrics, targets, table and figure."""
