"""Import of annotations from, and export of objects to, QuPath, ImageJ and COCO."""
