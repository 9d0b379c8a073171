"""File formats: decoders, checks of headers before memory is allocated, and damage detection."""
