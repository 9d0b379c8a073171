"""Segmentation from words: the image and text towers of an open_clip model, read out patch by patch."""
