"""Annotations as class labels, from label images, scribbles and shapes."""
