"""What a token sequence is made of: runs of text, images, and videos."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from vispe.options import Count, Positive, Whole, check_options

TEXT, IMAGE, VIDEO = 0, 1, 2  # as `mm_token_type_ids` of Hugging Face processors number them
WHOLE = (0, 0, 1, 1)  # tile row and column, tile rows and columns of a picture that is not cut
THUMBNAIL = -1  # tile row and column of a small copy of the whole picture

Part = tuple[int, int, int, tuple[int, int, int, int]]


@dataclass(frozen=True)
class Text:
    """A run of text tokens; markers such as vision_start are text.

    Attributes:
        tokens: how many.
        shared: whether what follows starts at the same position as this run: several answers to one question, each a
            shared run, do not see each other's positions or tokens.
        group: tokens of different groups have counters of their own where a scheme has them (`group_pe`).
        boundary: whether the last token ends a segment, such as a sentence, for schemes that count them (`bilevel`).
    """

    tokens: Whole
    shared: bool = False
    group: Count = 0
    boundary: bool = False

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class Image:
    """An image of h x w tokens, in raster order; or its tiles of h x w tokens each, row by row.

    Attributes:
        h: rows of tokens, after merging.
        w: columns of tokens, after merging.
        tiles: rows and columns of tiles of an image that is cut; the tokens of a tile are together.
        thumbnail: whether a small copy of the whole image, h x w tokens too, comes before or after the tiles.
    """

    h: Whole
    w: Whole
    tiles: tuple[Whole, Whole] = (1, 1)
    thumbnail: Literal["first", "last"] | None = None

    def __post_init__(self) -> None:
        check_options(self)

    def parts(self) -> Iterator[Part]:
        """Yield (t, h, w, tile) of every block of tokens."""
        rows, cols = self.tiles
        small: Part = (1, self.h, self.w, (THUMBNAIL, THUMBNAIL, rows, cols))
        if self.thumbnail == "first":
            yield small
        yield from ((1, self.h, self.w, (r, c, rows, cols)) for r in range(rows) for c in range(cols))
        if self.thumbnail == "last":
            yield small


@dataclass(frozen=True)
class Video:
    """A video of t frames of h x w tokens each, frame by frame, in raster order.

    Frames that text separates (timestamps) are one `Video` of t = 1 each.

    Attributes:
        t: frames of tokens, after merging in time.
        h: rows of tokens, after merging.
        w: columns of tokens, after merging.
        seconds: from one frame of tokens to the next; None where it is not known.
    """

    t: Whole
    h: Whole
    w: Whole
    seconds: Positive | None = None

    def __post_init__(self) -> None:
        check_options(self)

    def parts(self) -> Iterator[Part]:
        """Yield (t, h, w, tile) of the one block of tokens."""
        yield self.t, self.h, self.w, WHOLE


Segment = Text | Image | Video
