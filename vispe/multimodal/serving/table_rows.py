"""Integer table rows from coordinates, and the offset (delta) of generated tokens, for serving engines.

vLLM and SGLang store integers for the tokens of a prompt, and assign ``i + delta`` on all axes to generated token i,
with i counted from the start of the prompt. The integers index a table of cosines and sines.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vispe.errors import InputError, OptionError, UnsupportedCombination, counted
from vispe.multimodal.scheme import Scheme
from vispe.multimodal.streams.segments import Image, Text, Video
from vispe.multimodal.streams.token_stream import Stream
from vispe.utils.options import NonNegativeInt, PositiveInt, check_options

MOST_PARTS = 256  # enough for the smallest v2pe steps; every part costs a full table
NEAREST = 64  # coordinates that are not on a grid of parts are rounded to this many
NEAR = 1e-9  # tolerance in steps; float64 errors of fractions such as 1/3 are smaller


@dataclass(frozen=True, eq=False)
class ServedRequest:
    """State that an engine stores for a prompt.

    Attributes:
        ids: rows of the table (axes, s), int64; at least three axes, as engines need.
        delta: offset from the index of a generated token to its row, on all axes.
        error: largest rounding of a coordinate, in steps; angles differ by at most as many radians if no
            frequency is above 1.
    """

    ids: Tensor
    delta: int
    error: float


@dataclass(frozen=True)
class TableRows:
    """Numbering of coordinates, the same for every request of a server.

    A coordinate ``p + j / parts`` has row ``j * (positions + below) + p``; negative p count from the end of their
    part of the table, as Python indices. So text has the rows 0, 1, 2, ... in every request, with or without
    images, and requests with a common prefix can share its cached keys. Each generated token is one row after
    the previous one, also after an image that ends between two integers.

    Args:
        scheme: position scheme.
        positions: number of integer coordinates from 0 on; the coordinates of prompt and answer must be
            smaller.
        below: number of integer coordinates below 0, for schemes that centre images.
        parts: rows per integer coordinate, for schemes with fractions.
        nearest: round coordinates to the nearest row instead of raising an error; see `ServedRequest.error`.

    Raises:
        UnsupportedCombination: text of the scheme does not advance by one on all axes per token.

    Example:
        >>> from vispe.multimodal import Image, Stream, Text, create_scheme
        >>> rows = TableRows(create_scheme("videorope"), positions=16, below=2)
        >>> (found,) = rows.requests(Stream.of([[Text(1), Image(3, 5), Text(2)]]))
        >>> found.ids[2].tolist()
        [0, 17, 0, 1, 2, 3, 17, 0, 1, 2, 3, 17, 0, 1, 2, 3, 2, 3]
        >>> found.delta
        -14
    """

    scheme: Scheme
    positions: PositiveInt
    below: NonNegativeInt = 0
    parts: PositiveInt = 1
    nearest: bool = False

    def __post_init__(self) -> None:
        check_options(self, ("positions", "below", "parts", "nearest"))
        check_counted_on(self.scheme)

    @classmethod
    def reaching(
        cls,
        scheme: Scheme,
        positions: int,
        grid_thw: tuple[int, int, int] = (64, 64, 64),
        nearest: bool = False,
    ) -> TableRows:
        """Return the numbering for images up to a size: with the necessary negative rows and parts.

        Args:
            scheme: position scheme.
            positions: number of integer coordinates from 0 on.
            grid_thw: frames, rows and columns of the largest video or image, in tokens.
            nearest: round coordinates to 64 parts if no number of parts suffices.

        Raises:
            InputError: coordinates are not fractions of up to 64 parts, and `nearest` is false.
        """
        check_counted_on(scheme)
        frames, height, width = grid_thw
        # odd and even sizes, and some with coprime numbers of tokens, to reveal all fractions
        sizes = {(max(1, height - h), max(1, width - w)) for h in (0, 1) for w in (0, 1)}
        sizes |= {(min(h, height), min(w, width)) for h, w in ((1, 1), (3, 5), (7, 11), (13, 17))}
        stills = [Image(h, w) for h, w in sorted(sizes)]
        # without seconds, and with seconds that are not a simple fraction
        clips = [
            Video(max(1, frames - less), height, width, seconds=s) for less in (0, 1) for s in (None, 0.7391)
        ]
        requests = [
            scheme.coordinates(
                Stream.of([[Text(start), one, Text(1)] if start else [one, Text(1)]])
            ).ids.flatten()
            for one in (*stills, *clips)
            for start in (0, 1)
        ]
        values = torch.cat(requests)
        below = max(0, -int(values.min().floor()))
        ordered = (values - values.floor()).sort().values
        # merge fractions that differ by rounding
        fractions = torch.cat([ordered[:1], ordered[1:][ordered.diff() > 2 * NEAR]])
        for parts in range(1, MOST_PARTS + 1) if len(fractions) <= MOST_PARTS + 1 else ():
            if float((fractions * parts - (fractions * parts).round()).abs().max()) <= NEAR * parts:
                return cls(scheme, positions, below, parts)
        if not nearest:
            raise InputError(
                f"{scheme} gives coordinates that are not fractions of up to {MOST_PARTS} parts; nearest=True rounds "
                f"them to {NEAREST}, which moves tokens by 1/{2 * NEAREST} of a step at most, or take a scheme whose "
                "coordinates are whole."
            )
        return cls(scheme, positions, below, NEAREST, True)

    @property
    def length(self) -> int:
        """Number of rows of each part."""
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
        """Return the rows of coordinates, int64, and the largest distance of a coordinate from that of its row.

        Raises:
            InputError: a coordinate is between two rows and `nearest` is false, or outside of the table.
        """
        fine = coordinates.double() * self.parts
        number = fine.round()
        distance = float((fine - number).abs().max()) / self.parts if fine.numel() else 0.0
        if distance > NEAR and not self.nearest:
            raise InputError(
                f"{self.scheme} gives coordinates up to {counted(f'{distance:.3g}', 'step')} from the nearest of "
                f"{counted(self.parts, 'part')}. Set parts to a common denominator, or use nearest=True."
            )
        place = (number / self.parts).floor()
        low, high = (int(place.min()), int(place.max())) if fine.numel() else (0, 0)
        if low < -self.below or high >= self.positions:
            required = (
                f"below={-low}, the same for all requests" if low < -self.below else f"positions={high + 1}"
            )
            raise InputError(
                f"{self.scheme} has coordinates from {low} to {high}, but the table has {-self.below} to "
                f"{self.positions - 1}. Use {required}."
            )
        part = number - place * self.parts
        return (part * self.length + place % self.length).long(), distance

    def requests(self, stream: Stream) -> list[ServedRequest]:
        """Return the `ServedRequest` of each row of a stream, one prompt each, without padding.

        Raises:
            InputError: as `numbers`, also for generated tokens.
            UnsupportedCombination: attention is not causal over the full prompt, or there are groups.
        """
        blocks = stream.blocks
        unsupported = {
            "several samples in a row": blocks.document > 0,
            "groups": blocks.group > 0,
            "shared runs": blocks.shared,
            "Parallel members": None if blocks.parallel is None else blocks.parallel[:, 0] >= 0,
        }
        for what, mask in unsupported.items():
            if mask is not None and bool(mask.any()):
                raise UnsupportedCombination(
                    f"Engines need one causal sample per prompt, got a stream with {what}."
                )
        coordinates = self.scheme.coordinates(stream)
        axes = max(self.scheme.axes, 3)
        made: list[ServedRequest] = []
        for row, mask in enumerate(stream.mask):
            ids, distance = self.numbers(coordinates.ids[:, row, mask])
            following, off = self.numbers(coordinates.next[row])
            ids = ids.expand(axes, -1).clone() if self.scheme.axes == 1 else ids
            if len(ids) < axes:
                raise OptionError(f"Engines need one or three axes, got {len(ids)} of {self.scheme}.")
            made.append(ServedRequest(ids, int(following) - ids.shape[1], max(distance, off)))
        return made


def check_counted_on(scheme: Scheme) -> None:
    """Raise `UnsupportedCombination` unless text advances by one on all axes per token."""
    if scheme.levels > 1:
        raise UnsupportedCombination(
            f"Engines need a scheme with one counter, got {scheme.name} with {max(scheme.levels, scheme.counts)}."
        )
    three = scheme.text(torch.tensor([3.0], dtype=torch.float64))
    if scheme.step != 1 or bool((three != 3).any()):
        raise UnsupportedCombination(
            f"Engines need text that advances by one on all axes per token, got {scheme}. Use another scheme."
        )
