"""Files of other programs: annotations of QuPath, ImageJ and COCO in, objects out."""
