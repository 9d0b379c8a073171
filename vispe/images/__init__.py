"""Image and label files: found, read, checked and written; textures are made here too."""
