"""Codes that are fixed functions of the coordinates."""
