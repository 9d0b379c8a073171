"""Codes with learned tables or networks."""
