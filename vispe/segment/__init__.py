"""Feature segmentation of micrographs: images in, label maps, overlays and reports out.

`vispe.segment.pipeline` holds `segment` and `apply`, which the command line calls. Importing this package alone
imports none of the scientific libraries.
"""
