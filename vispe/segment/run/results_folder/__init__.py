"""Folder of the results: lock, journal, staged files and disk space."""
