"""The version of vispe."""

__version__ = "0.3.0"
