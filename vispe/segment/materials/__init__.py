"""Numbers that materials science asks of a label map: intercepts, grain size, interfaces, correlation, elongation."""
