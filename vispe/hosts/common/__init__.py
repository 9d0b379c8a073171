"""Conversion code shared by all libraries: specs, checks, context, position cache, loading."""
