"""From coordinates to whole numbers from 0 on, the rows of a table, and the delta by which an engine goes on.

vLLM and SGLang keep whole numbers for the tokens of a prompt, and number token i of what is generated ``i + delta`` on
all axes, i counted from the start of the prompt. The numbers are looked up in a table of cosines and sines.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vispe.errors import InputError, OptionError, UnsupportedCombination
from vispe.multimodal.scheme import Scheme
from vispe.multimodal.streams.segments import Image, Text, Video
from vispe.multimodal.streams.token_stream import Stream
from vispe.options import Count, Whole, check_options

MOST_PARTS = 256  # v2pe steps by as little; every part costs a whole table
NEAREST = 64  # parts that others are rounded to
NEAR = 1e-9  # steps within which a coordinate is on the grid; what float64 loses on fractions such as 1/3 is less


@dataclass(frozen=True, eq=False)
class Request:
    """What an engine keeps of one prompt.

    Attributes:
        ids: rows of the table (axes, s), int64; three axes at least, as engines have them.
        delta: what is added to the number of a token that is generated to get its row, on all axes.
        error: by how much a coordinate was rounded, in steps; angles are off by as many radians at most where no
            frequency is above 1.
    """

    ids: Tensor
    delta: int
    error: float


@dataclass(frozen=True)
class Rows:
    """How coordinates are numbered, the same for every request of a server.

    A coordinate ``p + j / parts`` has row ``j * (positions + below) + p``; negative p count from the end of their
    part of the table, as indices of Python do. So text has the rows 0, 1, 2, ... in every request, whether there are
    pictures or not, cached keys of a common prefix are those of both, and one token more is one row more even after
    a picture that ends between two whole numbers.

    Args:
        scheme: which gives the coordinates.
        positions: whole coordinates from 0 on that have rows; prompt and answer need to stay below.
        below: coordinates below 0 that have rows, for schemes that centre pictures.
        parts: rows from one whole coordinate to the next, for schemes with fractions.
        nearest: round coordinates to the nearest row, instead of an error; `Request.error` says by how much.

    Raises:
        UnsupportedCombination: the text of the scheme is not one step further on all axes with every token.

    Example:
        >>> from vispe.multimodal import Image, Stream, Text, create_scheme
        >>> rows = Rows(create_scheme("videorope"), positions=16, below=2)
        >>> (found,) = rows.requests(Stream.of([[Text(1), Image(3, 5), Text(2)]]))
        >>> found.ids[2].tolist()
        [0, 17, 0, 1, 2, 3, 17, 0, 1, 2, 3, 17, 0, 1, 2, 3, 2, 3]
        >>> found.delta
        -14
    """

    scheme: Scheme
    positions: Whole
    below: Count = 0
    parts: Whole = 1
    nearest: bool = False

    def __post_init__(self) -> None:
        check_options(self, ("positions", "below", "parts", "nearest"))
        check_counted_on(self.scheme)

    @classmethod
    def reaching(
        cls,
        scheme: Scheme,
        positions: int,
        picture: tuple[int, int, int] = (64, 64, 64),
        nearest: bool = False,
    ) -> Rows:
        """Return the numbering with as many rows below 0, and parts, as pictures up to a size need.

        Args:
            scheme: which gives the coordinates.
            positions: whole coordinates from 0 on that have rows.
            picture: frames, rows and columns of the largest video, in tokens; images are as large.
            nearest: round coordinates of schemes with which no number of parts does, to 64.

        Raises:
            InputError: coordinates are no fractions of up to 64 parts, and `nearest` is false.
        """
        check_counted_on(scheme)
        frames, height, width = picture
        # odd and even, and some whose numbers of tokens share no divisor: of what is cut finer, some fraction shows
        sizes = {(max(1, height - h), max(1, width - w)) for h in (0, 1) for w in (0, 1)}
        sizes |= {(min(h, height), min(w, width)) for h, w in ((1, 1), (3, 5), (7, 11), (13, 17))}
        stills = [Image(h, w) for h, w in sorted(sizes)]
        # without a clock, and with one that is no fraction of few parts where a scheme keeps fractions of seconds
        clips = [
            Video(max(1, frames - less), height, width, seconds=s) for less in (0, 1) for s in (None, 0.7391)
        ]
        found = [
            scheme.coordinates(
                Stream.of([[Text(start), one, Text(1)] if start else [one, Text(1)]])
            ).ids.flatten()
            for one in (*stills, *clips)
            for start in (0, 1)
        ]
        values = torch.cat(found)
        below = max(0, -int(values.min().floor()))
        ordered = (values - values.floor()).sort().values
        # equal fractions differ by rounding; on a grid there are as many as parts, and one just below a whole number
        fractions = torch.cat([ordered[:1], ordered[1:][ordered.diff() > 2 * NEAR]])
        for parts in range(1, MOST_PARTS + 1) if len(fractions) <= MOST_PARTS + 1 else ():
            if float((fractions * parts - (fractions * parts).round()).abs().max()) <= NEAR * parts:
                return cls(scheme, positions, below, parts)
        if not nearest:
            raise InputError(
                f"{scheme} gives coordinates that are no fractions of up to {MOST_PARTS} parts; nearest=True rounds "
                f"them to {NEAREST}, which moves tokens by 1/{2 * NEAREST} of a step at most, or take a scheme whose "
                "coordinates are whole."
            )
        return cls(scheme, positions, below, NEAREST, True)

    @property
    def length(self) -> int:
        """Rows of each of the parts."""
        return self.positions + self.below

    @property
    def size(self) -> int:
        """Rows of the whole table."""
        return self.length * self.parts

    def values(self) -> Tensor:
        """Return the coordinate of every row (size), float64."""
        place = torch.arange(self.length, dtype=torch.float64)
        place = torch.where(place < self.positions, place, place - self.length)
        part = torch.arange(self.parts, dtype=torch.float64) / self.parts
        return (part[:, None] + place).flatten()

    def numbers(self, coordinates: Tensor) -> tuple[Tensor, float]:
        """Return the rows of coordinates, int64, and the largest distance from a coordinate to that of its row.

        Raises:
            InputError: a coordinate is between two rows and `nearest` is false, or outside of the table.
        """
        fine = coordinates.double() * self.parts
        number = fine.round()
        away = float((fine - number).abs().max()) / self.parts if fine.numel() else 0.0
        if away > NEAR and not self.nearest:
            raise InputError(
                f"{self.scheme} gives coordinates up to {away:.3g} steps from the nearest of {self.parts} parts; let "
                "parts be the number that makes them whole, or round by nearest=True."
            )
        place = (number / self.parts).floor()
        low, high = (int(place.min()), int(place.max())) if fine.numel() else (0, 0)
        if low < -self.below or high >= self.positions:
            wanted = (
                f"below={-low}, the same for all requests" if low < -self.below else f"positions={high + 1}"
            )
            raise InputError(
                f"{self.scheme} gives coordinates from {low} to {high}; the table has {-self.below} to "
                f"{self.positions - 1}. It would need {wanted}."
            )
        part = number - place * self.parts
        return (part * self.length + place % self.length).long(), away

    def requests(self, stream: Stream) -> list[Request]:
        """Return what an engine keeps of each row of a stream, a prompt each, without its padding.

        Raises:
            InputError: as `numbers`; what is generated counts too.
            UnsupportedCombination: tokens are seen by others than by all that follow, or are counted in groups.
        """
        blocks = stream.blocks
        odd = {
            "several samples in a row": blocks.document > 0,
            "groups": blocks.group > 0,
            "shared runs": blocks.shared,
            "members side by side": None if blocks.parallel is None else blocks.parallel[:, 0] >= 0,
        }
        for what, found in odd.items():
            if found is not None and bool(found.any()):
                raise UnsupportedCombination(
                    f"A prompt of an engine is one sample that sees all before it; the stream has {what}."
                )
        coordinates = self.scheme.coordinates(stream)
        axes = max(self.scheme.axes, 3)
        made: list[Request] = []
        for row, mask in enumerate(stream.mask):
            ids, away = self.numbers(coordinates.ids[:, row, mask])
            following, off = self.numbers(coordinates.next[row])
            ids = ids.expand(axes, -1).clone() if self.scheme.axes == 1 else ids
            if len(ids) < axes:
                raise OptionError(f"{self.scheme} has {len(ids)} axes; engines take three, or one for all.")
            made.append(Request(ids, int(following) - ids.shape[1], max(away, off)))
        return made


def check_counted_on(scheme: Scheme) -> None:
    """Raise `UnsupportedCombination` unless text goes on one step further on all axes with every token."""
    if scheme.levels > 1:
        raise UnsupportedCombination(
            f"The counter of {scheme.name} holds {max(scheme.levels, scheme.counts)} numbers; engines go on by one "
            "delta."
        )
    three = scheme.text(torch.tensor([3.0], dtype=torch.float64))
    if scheme.step != 1 or bool((three != 3).any()):
        raise UnsupportedCombination(
            f"{scheme} does not count text one by one on all axes, which is how engines go on after a "
            "prompt; take a scheme whose text does."
        )
