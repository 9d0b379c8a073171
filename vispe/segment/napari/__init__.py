"""The napari plugin: paint a few labels, watch the segmentation follow. Needs the extra `vispe[cli,napari]`."""
