"""Decoders of microscope formats and volumes with libraries of the extra `vendors`."""
