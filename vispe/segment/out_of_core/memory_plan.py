"""Choice of the block size from an estimate of the memory of each step."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from vispe.errors import InputError, OptionError
from vispe.segment.features.filters.filters2d import SIGMAS
from vispe.segment.features.pixel_features import Features
from vispe.segment.features.tiles import Region
from vispe.segment.model.model_file import Model
from vispe.segment.out_of_core.block_engine import reach
from vispe.segment.out_of_core.source.image import OutOfCoreImage

DEFAULT = "2 GiB"
"""Default memory limit."""

CHUNK = 1024
"""Largest side of a chunk of the result in pixels."""

LARGEST = 4096
"""Largest side of a block in pixels."""

_SIDES = (4096, 3072, 2048, 1536, 1024, 768, 512, 384, 256, 128)
_UNITS = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_OWN = 24 << 20  # overhead of interpreter, store and allocator in bytes
_MODEL = 700  # bytes per pixel of a tile of vispe_micro
_OVERLAY = 2048  # longest side of the overlay in pixels


@dataclass(frozen=True)
class MemoryPlan:
    """Sizes that fit into the memory limit.

    Attributes:
        side: side of a block in pixels, a multiple of `chunk`.
        chunk: side of a chunk of the result in pixels.
        threads: number of pieces computed in parallel.
        bytes: estimated memory.
        reduction: downscaling factor of the overlay.
    """

    side: int
    chunk: int
    threads: int
    bytes: int
    reduction: int


def parse_memory(text: str | int) -> int:
    """Convert '2 GiB', '500MB' or a number of bytes to bytes; units are powers of 1024, with or without i and B.

    Raises:
        OptionError: not an amount of memory, or zero.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([kmgt]?)i?b?\s*", str(text).lower())
    size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if size <= 0:
        raise OptionError(
            f"memory={text!r} is not an amount of memory. Use a value such as '2 GiB' or '500 MB'."
        )
    return size


def make_plan(
    image: OutOfCoreImage,
    features: Features,
    model: Model,
    pieces: list[Region],
    smooth: int,
    memory: int,
    *,
    chunk: int | None = None,
    parts: int = 1,
    complete: Mapping[str, int] | None = None,
) -> MemoryPlan:
    """Return the largest block whose estimated memory is within `memory`.

    Args:
        image: the image.
        features: feature extractor.
        model: the model.
        pieces: pieces of a page.
        smooth: radius in pixels.
        memory: limit in bytes.
        chunk: side of the chunks of an unfinished result; None chooses.
        parts: minimal number of blocks, if the image is large enough, such as the number of processes.
        complete: options that need complete pages, and their bytes per pixel; blocks then are complete pages.

    Raises:
        InputError: the smallest block does not fit.
    """
    piece = max(p.shape[0] * p.shape[1] for p in pieces)
    longest = max(max(p.shape) for p in pieces)
    pixels = image.n_pages * image.shape[0] * image.shape[1]
    cap = min(LARGEST, max(2 * longest, int((pixels / parts) ** 0.5)))
    threads = torch.get_num_threads() if features.device == "cpu" else 1
    least, sides, more = 0, _SIDES, 0
    if complete:
        side = next(
            (s for s in sorted(_SIDES) if s >= max(image.shape)), -(-max(image.shape) // CHUNK) * CHUNK
        )
        sides = (side if chunk is None else -(-side // chunk) * chunk,)
        cap, more = sides[0], max(complete.values()) * image.shape[0] * image.shape[1]
    for count in dict.fromkeys((threads, 1)):
        for side in sides:
            if (chunk is not None and side % chunk) or side > max(cap, chunk or _SIDES[-1]):
                continue
            least = _estimate(image, features, model, piece, longest, side, smooth, count) + more
            if least <= memory:
                chunk_text = chunk or max(
                    c for c in _SIDES if c <= CHUNK and side % c == 0 and c & (c - 1) == 0
                )
                return MemoryPlan(
                    side, chunk_text, count, least, _reduction(image, chunk_text, memory - _OWN)
                )
    if complete:
        raise InputError(
            f"memory={_amount(memory)} is too small for {image.path.name}: {' and '.join(complete)} need complete "
            f"pages, which take {_amount(least)} in addition to the libraries. Increase memory, or crop the image."
        )
    chunk_text = "" if chunk is None else f" of {chunk} px, the chunks of the unfinished result,"
    hint = "Increase it, or reduce tile"
    if image.chunk_bytes > memory // 4:
        hint = f"The image has chunks of {_amount(image.chunk_bytes)}: store it in smaller ones, or increase memory"
    raise InputError(
        f"memory={_amount(memory)} is too small for {image.path.name}: the smallest blocks{chunk_text} need "
        f"{_amount(least)} in addition to the libraries. {hint}."
    )


def _estimate(
    image: OutOfCoreImage,
    features: Features,
    model: Model,
    piece: int,
    longest: int,
    side: int,
    smooth: int,
    threads: int,
) -> int:
    """Return the estimated size of the arrays that exist at the same time, in bytes."""
    margin, channels, classes = reach(features), image.channels, model.classifier.n_classes
    height, width = image.shape
    grown = min(side + 2 * smooth, height) * min(side + 2 * smooth, width)
    extent = side + 2 * (smooth + longest + margin)
    wide = min(extent, width)
    window = min(extent, height) * wide * (4 * channels + 1)
    strip = min(image.chunk[0], height) * (wide + 2 * image.chunk[1]) * channels * image.dtype.itemsize
    reading = window + 2 * strip + 4 * image.chunk_bytes
    block = grown * (4 * classes + 8) + side * side * (5 + 8) + (12 * grown if smooth else 0)
    writing = 4 * 4 * min(side, CHUNK) ** 2
    around = (piece**0.5 + 2 * margin) ** 2
    work = 0.0
    if margin:
        count = 1 + 5 * len(features.config.sigmas or SIGMAS)
        work += around * 60 + 4 * count * channels * piece
    if features.config.kind != "filters":
        work += _MODEL * piece + (4 * 32 * channels * piece if model.classifier.kind != "logistic" else 0)
    if model.classifier.kind != "logistic":
        work += 3 * (4 * count * channels * piece if margin else 0) + 16 * classes * piece
        threads = 1
    work += 20 * classes * piece
    return int(_OWN + reading + max(block + writing, block + threads * work))


def _reduction(image: OutOfCoreImage, chunk: int, memory: int) -> int:
    """Return the downscaling factor of the overlay: no side above `_OVERLAY`, and drawn within the memory."""
    step, (height, width) = 1, image.shape
    each = 40 + 16 * image.channels  # bytes per pixel of the overlay during drawing
    while (max(height, width) > _OVERLAY * step or each * height * width > memory * step**2) and step < chunk:
        step *= 2
    return step


def _amount(size: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20)):
        if size >= factor:
            return f"{np.ceil(10 * size / factor) / 10:g} {unit}"
    return f"{size} bytes"


def page_bytes(classes: int, channels: int) -> dict[str, int]:
    """Return the approximate bytes per pixel of options that need a complete page, in addition to the block."""
    prediction = 4 * (classes + 2 * channels) + 8
    return {"min_area": 48, "clean": 96, "materials": 64, "trust": 3 * prediction + 48}
