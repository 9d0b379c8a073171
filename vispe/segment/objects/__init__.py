"""Objects in label maps: found, split where they touch, measured, and counted."""
