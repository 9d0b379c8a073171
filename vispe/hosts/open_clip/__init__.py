"""Vision towers of open_clip."""
