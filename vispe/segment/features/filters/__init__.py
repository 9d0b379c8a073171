"""Equivariant filters of pages and volumes."""
