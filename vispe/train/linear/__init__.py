"""Linear segmentation on frozen features."""
