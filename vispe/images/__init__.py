"""Images, labels, masks and textures: found, read, checked and written. Nothing else knows file formats."""
