"""Conformance with the authors' own code: `python -m tests.golden DIR`."""
