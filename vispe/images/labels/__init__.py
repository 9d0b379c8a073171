"""Labels that people draw: read from images, layers and shapes, as strokes."""
