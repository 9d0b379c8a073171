"""napari plugin: paint a few labels and see the segmentation update. Needs the extra `vispe[cli,napari]`."""
