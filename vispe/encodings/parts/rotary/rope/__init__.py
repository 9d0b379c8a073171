"""RoPE variants with angles linear in the coordinates: base classes, augmentation and division of channels."""
