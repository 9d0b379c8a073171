"""Waves, Fourier features and curves shared by additive encodings."""
