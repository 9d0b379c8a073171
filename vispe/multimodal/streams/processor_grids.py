"""Blocks of images and videos from the grids of processors: tensors of frames, rows and columns, or segments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from vispe.errors import InputError, OptionError, ShapeError, counted
from vispe.multimodal.streams.segments import WHOLE, Image, Video
from vispe.multimodal.streams.torch_typing import listed

# size (m, 3), seconds (m), image or video index (m), tile (m, 4) of each block
Pictures = tuple[Tensor, Tensor, Tensor, Tensor]


def visual_blocks(
    images: Tensor | Sequence[Image] | None,
    videos: Tensor | Sequence[Video] | None,
    merge: int,
    seconds: Tensor | Sequence[float] | None,
    separate_frames: bool,
    device: torch.device,
) -> tuple[Pictures, int]:
    """Return the blocks of images, then those of videos, and the number of image blocks.

    The arguments are those of `Stream.from_ids`, and the device of the blocks.
    """
    of_images = _blocks(images, merge, None, False, "image")
    of_videos = _blocks(videos, merge, seconds, separate_frames, "video")
    size, clock, number, tile = of_videos
    count = int(of_images[2][-1]) + 1 if len(of_images[2]) else 0
    pairs = zip(of_images, (size, clock, number + count, tile), strict=True)
    size, clock, number, tile = (torch.cat([a.to(device), b.to(device)]) for a, b in pairs)
    return (size, clock, number, tile), len(of_images[0])


def _blocks(supplied: object, merge: int, seconds: object, separate_frames: bool, kind: str) -> Pictures:
    """Return the blocks of all images, or of all videos."""
    if isinstance(supplied, Tensor):
        return _blocks_of_grids(supplied, merge, seconds, separate_frames, kind)
    return _blocks_of_segments(() if supplied is None else supplied, seconds, separate_frames, kind)


def _blocks_of_segments(supplied: object, seconds: object, separate_frames: bool, kind: str) -> Pictures:
    _check_segments(supplied, kind, seconds, separate_frames)
    segments = cast("Sequence[Image | Video]", supplied)  # checked above
    parts = [
        (p, n, s.seconds if isinstance(s, Video) else None) for n, s in enumerate(segments) for p in s.parts()
    ]
    size = torch.tensor([p[:3] for p, _, _ in parts], dtype=torch.long).reshape(-1, 3)
    tile = torch.tensor([p[3] for p, _, _ in parts], dtype=torch.long).reshape(-1, 4)
    clock = torch.tensor([torch.nan if s is None else s for _, _, s in parts], dtype=torch.float64)
    return size, clock, torch.tensor([n for _, n, _ in parts], dtype=torch.long), tile


def _blocks_of_grids(
    grids: Tensor, merge: int, seconds: object, separate_frames: bool, kind: str
) -> Pictures:
    if grids.ndim != 2 or grids.shape[1] != 3:
        raise ShapeError(
            f"{kind} grids need the shape (n, 3) of frames, rows, columns, got {tuple(grids.shape)}."
        )
    if grids.is_floating_point() or grids.is_complex() or grids.dtype == torch.bool:
        raise InputError(f"{kind} grids need integers, got {grids.dtype}.")
    size = grids.long()
    if bool(((size < 1).any(1) | (size[:, 1:] % merge).any(1)).any()):
        raise InputError(
            f"Every {kind} grid needs at least one frame, and rows and columns that {merge} divides, "
            f"got {listed(size)}."
        )
    frames, rows, columns = size.unbind(1)
    size = torch.stack([frames, rows // merge, columns // merge], 1)
    clock = torch.full((len(size),), torch.nan, dtype=torch.float64, device=size.device)
    if seconds is not None:
        clock = torch.as_tensor(seconds, dtype=torch.float64, device=size.device)
        if clock.shape != (len(size),):
            raise ShapeError(
                f"seconds needs one value for each of {counted(len(size), 'video')}, got {tuple(clock.shape)}."
            )
        if bool(((clock <= 0) | clock.isinf()).any()):
            raise InputError(f"seconds must be above 0, got {listed(clock)}.")
    if separate_frames:
        size, clock = (x.repeat_interleave(frames, 0) for x in (size, clock))
        size = torch.cat([torch.ones_like(size[:, :1]), size[:, 1:]], 1)
    number = torch.arange(len(size), device=size.device)
    return size, clock, number, size.new_tensor(WHOLE).expand(len(size), 4)


def _check_segments(supplied: object, kind: str, seconds: object, separate_frames: bool) -> None:
    """Raise unless a list contains only segments of one kind, and no argument repeats what the segments define."""
    segment_type = Image if kind == "image" else Video
    for s in supplied:  # type: ignore[attr-defined]
        if not isinstance(s, segment_type):
            raise InputError(
                f"{kind}s needs a tensor of grids (n, 3), or a {segment_type.__name__} for each, got {s!r}."
            )
    if seconds is not None and len(seconds):  # type: ignore[arg-type]
        raise OptionError(
            "seconds has no effect with a list of videos. Use Video(t, h, w, seconds=...) instead."
        )
    if separate_frames and any(s.t > 1 for s in supplied):  # type: ignore[attr-defined]
        raise OptionError(
            "separate_frames has no effect with a list of videos. Pass a Video with t=1 for each frame instead."
        )
