"""The position schemes; importing this package registers them."""

from vispe.multimodal.schemes import mrope as mrope
