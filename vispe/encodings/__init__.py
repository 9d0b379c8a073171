"""The encodings, one file each. Importing this package registers them."""

from vispe.encodings import alibi, alibi2d, learned, none, sincos2d

__all__ = ["alibi", "alibi2d", "learned", "none", "sincos2d"]
