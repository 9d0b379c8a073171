"""The version of vispe."""

__version__ = "0.2.0"
