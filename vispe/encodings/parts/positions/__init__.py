"""Base class and ranges shared by position samplers."""
