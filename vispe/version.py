"""The version of vispe."""

__version__ = "0.1.0"
