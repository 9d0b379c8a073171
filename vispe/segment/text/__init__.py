"""Segmentation from text prompts with the image and text towers of an open_clip model, read out patch by patch."""
