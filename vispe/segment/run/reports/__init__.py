"""Records of a run: of each image, of the run, and as an HTML page."""
