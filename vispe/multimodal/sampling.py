"""Position samplers for token streams: one map of positions per row, for text and visual segments."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from vispe.encodings.parts.positions.sampler import Sampler, interpolated
from vispe.errors import ShapeError, UnsupportedCombination, counted
from vispe.multimodal.coordinates import Coordinates


def sampled(
    coordinates: Coordinates,
    sampler: Sampler,
    *,
    generator: torch.Generator | None = None,
    places: Tensor | None = None,
) -> tuple[Coordinates, Tensor]:
    """Return the coordinates of a stream mapped by a sampler, and the map of each row.

    All axes of a row share its map, so that text keeps the same coordinate on all of them; fractions are interpolated.
    The counter is mapped as well, so decoding continues after the last position.

    Args:
        coordinates: coordinates of a scheme, 0 or more.
        sampler: the sampler; in evaluation some samplers leave positions unchanged.
        generator: source of the draws; the global one by default.
        places: maps of a previous call (b or 1, positions), used instead of drawing.

    Raises:
        UnsupportedCombination: the counter of the scheme has several numbers.
        ShapeError: a coordinate is below 0, or the maps in `places` have fewer positions than the stream.

    Example:
        >>> from vispe import create_encoding
        >>> from vispe.multimodal import Stream, Text, create_scheme
        >>> ids = create_scheme("rope1d").coordinates(Stream.of([[Text(4)]]))
        >>> moved, places = sampled(ids, create_encoding("randomized(reach=100)").eval())
        >>> moved.ids.tolist(), moved.next.tolist()
        ([[[12.0, 37.0, 62.0, 87.0]]], [88.0])
    """
    ids, scheme = coordinates.ids, coordinates.scheme
    if scheme.levels > 1:
        raise UnsupportedCombination(
            f"A sampler needs a scheme with one counter, got {scheme.name} with {scheme.levels}. Use another scheme, "
            "such as mrope_i."
        )
    real = ids[:, coordinates.mask]
    if real.numel() and float(real.min()) < 0:
        raise ShapeError(f"A sampler needs positions of 0 or more, got {float(real.min()):g}.")
    count = 1 + int(real.max().ceil()) if real.numel() else 1
    if places is None:
        places = _places(sampler, count, len(coordinates.mask), generator, ids.device)
    if places is None:
        return coordinates, torch.arange(count, dtype=torch.float64, device=ids.device)[None]
    if coordinates.extent is not None:
        raise UnsupportedCombination(
            f"Parallel members are placed by their lengths, which {sampler.name} would change. Omit the sampler."
        )
    if places.ndim != 2 or places.shape[1] < count:
        raise ShapeError(
            f"places need one number for each of {counted(count, 'position')}, got {tuple(places.shape)}."
        )
    moved = torch.stack([interpolated(places, axis) for axis in ids.unbind()])
    following = interpolated(places, coordinates.next[:, None])[:, 0]
    ids = torch.where(coordinates.mask, moved, ids)
    return replace(coordinates, ids=ids, next=following), places


def _places(
    sampler: Sampler, count: int, rows: int, generator: torch.Generator | None, device: torch.device
) -> Tensor | None:
    """Return the new positions of 0, 1, ... of each row (rows or 1, count), or None if unchanged."""
    if not (sampler.training or sampler.always):
        fixed = sampler.fixed(count, device)
        return None if fixed is None else fixed[None]
    if generator is None and sampler.seed is not None:
        generator = torch.Generator().manual_seed(sampler.seed)
    where = device if generator is None else generator.device
    lines = [sampler.draw(count, generator, where) for _ in range(rows if sampler.per == "sample" else 1)]
    return torch.stack(lines).to(device)
