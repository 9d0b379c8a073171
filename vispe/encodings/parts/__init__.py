"""What several encodings are made of."""
