"""Feature segmentation of micrographs: images in, label maps, overlays and reports out."""
