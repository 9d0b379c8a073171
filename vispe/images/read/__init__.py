"""Reading of micrographs as arrays (z, h, w, c) with metadata and notes."""

from vispe.images.read.image_file import read_image
from vispe.images.read.micrograph import Micrograph
from vispe.images.read.selection import channel_numbers, pick_pages

__all__ = ["Micrograph", "channel_numbers", "pick_pages", "read_image"]
