"""Mixing encodings: operations between neighbouring tokens, and `none`."""
