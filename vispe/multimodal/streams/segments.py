"""What a token sequence is made of: runs of text, images, and videos."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from vispe.errors import OptionError, is_whole
from vispe.options import Count, Limits, Positive, Whole, check_options

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
        cells: cells of a picture that the tokens speak of, one for each token or one for all: they get the coordinates
            of that cell, (row, column), or of the middle of a box, (r0, c0, r1, c1), whose ends are included; in videos
            the frame comes first. Rows and columns run through all tiles of an image. What follows is counted as ever.
        of: the picture: its segment, or its number in the sample, from 0 on; not needed where there is but one.
    """

    tokens: Whole
    shared: bool = False
    group: Count = 0
    boundary: bool = False
    cells: (
        Annotated[tuple[Annotated[tuple[Count, ...], Limits(least=2, most=5)], ...], Limits(least=1)] | None
    ) = None
    of: Image | Video | int | None = None

    def __post_init__(self) -> None:
        check_options(self)
        if (
            self.of is not None
            and not isinstance(self.of, Image | Video)
            and (not is_whole(self.of) or self.of < 0)
        ):
            raise OptionError(
                f"Text: of is a picture of the sample, or its number from 0 on, got of={self.of!r}."
            )
        if self.of is not None and self.cells is None:
            raise OptionError(
                f"Text(of={self.of!r}) names a picture, but no cells of it; give cells=[(row, column)]."
            )
        if self.cells is not None and len(self.cells) not in (1, self.tokens):
            raise OptionError(
                f"Text of {self.tokens} tokens needs a cell for each of them, or one for all, got {len(self.cells)}."
            )


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
