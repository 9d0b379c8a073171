"""Segments of token sequences: text runs, images and videos."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from vispe.errors import OptionError, counted, is_integer
from vispe.utils.interval import Interval
from vispe.utils.options import NonNegativeInt, PositiveFloat, PositiveInt, check_options

TEXT, IMAGE, VIDEO = 0, 1, 2  # numbers of `mm_token_type_ids` of Hugging Face processors
WHOLE = (0, 0, 1, 1)  # tile row and column, tile rows and columns of an image without tiles
THUMBNAIL = -1  # tile row and column of a thumbnail

Part = tuple[int, int, int, tuple[int, int, int, int]]


@dataclass(frozen=True)
class Text:
    """A run of text tokens; markers such as vision_start are text.

    Attributes:
        tokens: number of tokens.
        shared: whether the next segment starts at the same position as this run: several answers to one question,
            each a shared run, have the same positions and do not attend to each other.
        group: index of the group, counted separately by some schemes (`group_pe`).
        boundary: whether the last token ends a segment, such as a sentence, for schemes that count them (`bilevel`).
        cells: cells of an image or video that the tokens refer to, one per token or one for all: they get the
            coordinates of that cell, (row, column), or of the centre of a box, (r0, c0, r1, c1), bounds included; in
            videos the frame comes first. Rows and columns run through all tiles of an image. Later tokens are not
            affected.
        of: the image or video: its segment, or its index in the sample; not needed if there is only one.

    Raises:
        OptionError: an option has an invalid value, `of` is passed without `cells`, or the number of cells is
            neither 1 nor that of tokens.

    Example:
        >>> Text(3, boundary=True).tokens
        3
        >>> Text(1, cells=[(0, 1)], of=Image(2, 2)).cells
        ((0, 1),)
    """

    tokens: PositiveInt
    shared: bool = False
    group: NonNegativeInt = 0
    boundary: bool = False
    cells: (
        Annotated[
            tuple[Annotated[tuple[NonNegativeInt, ...], Interval(least=2, most=5)], ...], Interval(least=1)
        ]
        | None
    ) = None
    of: Image | Video | int | None = None

    def __post_init__(self) -> None:
        check_options(self)
        if (
            self.of is not None
            and not isinstance(self.of, Image | Video)
            and (not is_integer(self.of) or self.of < 0)
        ):
            raise OptionError(
                f"Text: of must be an image or video of the sample, or its index from 0 on, got of={self.of!r}."
            )
        if self.of is not None and self.cells is None:
            raise OptionError(f"Text(of={self.of!r}) needs cells, got None. Pass cells=[(row, column)].")
        if self.cells is not None and len(self.cells) not in (1, self.tokens):
            raise OptionError(
                f"Text of {counted(self.tokens, 'token')} needs a cell for each of them, or one for all, got "
                f"{len(self.cells)}."
            )


@dataclass(frozen=True)
class Image:
    """Image of h x w tokens, in raster order; or tiles of h x w tokens each, row by row.

    Attributes:
        h: rows of tokens, after merging.
        w: columns of tokens, after merging.
        tiles: rows and columns of tiles; the tokens of a tile are consecutive.
        thumbnail: whether a thumbnail, also h x w tokens, comes before or after the tiles.

    Raises:
        OptionError: a number is not an integer above 0, or `thumbnail` is invalid.

    Example:
        >>> tiled = Image(2, 3, tiles=(1, 2), thumbnail='first')
        >>> sum(t * h * w for t, h, w, _ in tiled.parts())
        18
    """

    h: PositiveInt
    w: PositiveInt
    tiles: tuple[PositiveInt, PositiveInt] = (1, 1)
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
    """Video of t frames of h x w tokens each, frame by frame, in raster order.

    Frames that text separates (timestamps) are one `Video` of t = 1 each.

    Attributes:
        t: frames of tokens, after merging in time.
        h: rows of tokens, after merging.
        w: columns of tokens, after merging.
        seconds: time between frames of tokens; None if unknown.

    Raises:
        OptionError: a number is not an integer above 0, or `seconds` is not above 0.

    Example:
        >>> Video(t=4, h=2, w=2, seconds=0.5)
        Video(t=4, h=2, w=2, seconds=0.5)
    """

    t: PositiveInt
    h: PositiveInt
    w: PositiveInt
    seconds: PositiveFloat | None = None

    def __post_init__(self) -> None:
        check_options(self)

    def parts(self) -> Iterator[Part]:
        """Yield (t, h, w, tile) of the single block of tokens."""
        yield self.t, self.h, self.w, WHOLE


Segment = Text | Image | Video
