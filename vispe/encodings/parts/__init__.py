"""Building blocks that several encodings share."""
