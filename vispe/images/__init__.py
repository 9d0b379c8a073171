"""Image and label files: search, reading, validation and writing; and synthetic textures."""
