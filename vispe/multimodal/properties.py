"""Properties of position schemes, measured from the coordinates of test streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vispe.errors import UnsupportedCombination
from vispe.multimodal.coordinates import Coordinates
from vispe.multimodal.registry import create_scheme
from vispe.multimodal.rotary.angles import angles
from vispe.multimodal.scheme import Scheme
from vispe.multimodal.streams.segments import Image, Segment, Text, Video
from vispe.multimodal.streams.token_stream import Stream
from vispe.multimodal.streams.torch_typing import distinct, listed, unfolded

PAIRS, KV_HEADS = 64, 8  # of a hypothetical model
_IMAGES = ((1, 1), (3, 5), (7, 4), (24, 36), (40, 11), (61, 61))
_VIDEOS = ((1, 3, 5), (2, 3, 5), (16, 12, 18), (3, 24, 20), (9, 2, 3), (97, 7, 4))
_LONG = Video(97, 5, 7, seconds=0.7)
_TILES = Image(16, 16, (2, 3), "last")

Size = tuple[int, int, int]
_RULES: tuple[tuple[str, Callable[[int, int, int], float]], ...] = (
    ("1", lambda t, h, w: 1),
    ("t", lambda t, h, w: t),
    ("h", lambda t, h, w: h),
    ("max(h, w)", lambda t, h, w: max(h, w)),
    ("max(t, h, w)", lambda t, h, w: max(t, h, w)),
    ("h + w - 1", lambda t, h, w: h + w - 1),
    ("ceil(min(h, w) / 2)", lambda t, h, w: (min(h, w) + 1) // 2),
    ("t h", lambda t, h, w: t * h),
    ("t max(h, w)", lambda t, h, w: t * max(h, w)),
    ("t (h + w - 1)", lambda t, h, w: t * (h + w - 1)),
    ("t ceil(min(h, w) / 2)", lambda t, h, w: t * ((min(h, w) + 1) // 2)),
    ("h w", lambda t, h, w: h * w),
    ("h w + 1", lambda t, h, w: h * w + 1),
    ("t h w", lambda t, h, w: t * h * w),
    ("t h w + t", lambda t, h, w: t * h * w + t),
)


@dataclass(frozen=True)
class SchemeProperties:
    """Properties of a scheme for text, images of h x w and videos of t x h x w tokens.

    Attributes:
        scheme: spec of the scheme.
        axes: coordinates of a token.
        text_exact: whether pure text is rotated exactly (bitwise) as by 1D RoPE.
        whole: whether all coordinates are integers; others lose precision in half precision.
        decode_safe: whether generated tokens have the coordinates that they would have in the prompt, one step after
            the last text token.
        image: number of positions that an image uses, that is, the shift of the text after it: a formula if one
            fits, else the range.
        video: number of positions that a video uses, in the same form.
        image_cost: number of positions that an image of 24 x 36 tokens uses.
        tiles_cost: number of positions that 2 x 3 tiles of 16 x 16 tokens and a thumbnail use; None if tiles
            are not supported.
        video_cost: number of positions that a video of 16 x 12 x 18 tokens uses.
        grows: whether an image of 48 x 72 uses more positions than one of 24 x 36.
        image_gap: smallest and largest distance over all axes from the largest coordinate of an image of 24 x 36 to the
            text after it; 0 or less means that text is within the range of the image.
        video_gap: the same distance for a video of 97 x 5 x 7.
        follows_text: for each axis, whether the coordinates inside an image move with the text before it.
        distinct_image: whether all tokens of an image differ in their coordinates.
        distinct_tiles: whether all tokens of an image in tiles with a thumbnail differ; None if tiles are not
            supported.
        distinct_video: whether all tokens of a video differ.
        mirrored: whether flipping an image horizontally or vertically only permutes axes.
        level: whether all tokens of an image have the same mean over axes, so that they are equally far from text.
        timed: whether the seconds between frames have an effect.
        random: whether coordinates are drawn at random in training.
    """

    scheme: str
    axes: int
    text_exact: bool
    whole: bool
    decode_safe: bool
    image: str
    video: str
    image_cost: float
    tiles_cost: float | None
    video_cost: float
    grows: bool
    image_gap: tuple[float, float]
    video_gap: tuple[float, float]
    follows_text: tuple[bool, ...]
    distinct_image: bool
    distinct_tiles: bool | None
    distinct_video: bool
    mirrored: bool
    level: bool
    timed: bool
    random: bool


def properties(scheme: str | dict[str, Any] | Scheme) -> SchemeProperties:
    """Measure the properties of a scheme from its coordinates.

    Args:
        scheme: name, spec, or a `Scheme`. Properties of text are those of a model with 64 pairs of channels and 8
            key heads.

    Raises:
        UnknownName: the scheme does not exist.
        OptionError: an option is invalid.
    """
    rule = create_scheme(scheme)
    images = {(1, h, w): _cost(rule, Image(h, w)) for h, w in _IMAGES}
    videos = {size: _cost(rule, Video(*size)) for size in _VIDEOS}
    image = unfolded(_inside(rule, Image(24, 36)), 1, (24, 36))
    moved = _inside(rule, Image(5, 7), 50) - _inside(rule, Image(5, 7), 3)
    tiles = _tiles(rule)
    return SchemeProperties(
        scheme=str(rule),
        axes=rule.axes,
        text_exact=is_text_exact(rule),
        whole=is_whole(rule),
        decode_safe=all(_decode_safe(rule, image) for image in (Image(5, 7), Image(1, 9), _LONG)),
        image=_formula(images),
        video=_formula(videos),
        image_cost=images[1, 24, 36],
        tiles_cost=None if tiles is None else tiles[1],
        video_cost=videos[16, 12, 18],
        grows=_cost(rule, Image(48, 72)) >= images[1, 24, 36] + 1,
        image_gap=_gap(rule, Image(24, 36)),
        video_gap=_gap(rule, _LONG),
        follows_text=tuple(bool((row != 0).any()) for row in moved),
        distinct_image=_distinct(image.flatten(1)),
        distinct_tiles=None if tiles is None else tiles[0],
        distinct_video=_distinct(_inside(rule, _LONG)),
        mirrored=all(_rows(image) == _rows(image.flip(axis)) for axis in (1, 2)),
        level=bool(((mean := image.mean(0)) - mean[0, 0]).abs().max() < 1e-9),
        timed=not torch.equal(_inside(rule, Video(4, 2, 3, 0.5)), _inside(rule, Video(4, 2, 3, 3.0))),
        random=_random(rule),
    )


def is_whole(scheme: Scheme) -> bool:
    """Whether all coordinates of a scheme are integers."""
    return all(bool((ids == ids.round()).all()) for ids in _samples(scheme))


def is_text_exact(scheme: Scheme, pairs: int = PAIRS, kv_heads: int = KV_HEADS) -> bool:
    """Whether a scheme rotates pure text exactly (bitwise) as 1D RoPE.

    Args:
        scheme: the scheme.
        pairs: pairs of channels of a head, on which the default sections depend.
        kv_heads: key heads of the model; some schemes do not rotate all of them.
    """
    frequencies = 10_000.0 ** (-torch.arange(pairs) / pairs)
    rotated = angles(_of(scheme, Text(700)).ids, frequencies, scheme.allocation(pairs, kv_heads))
    plain = torch.arange(700).float()[:, None] * frequencies
    plain = plain.tile(rotated.shape[-1] // pairs)  # an allocation may have an axis for each channel
    return torch.equal(rotated, plain.expand_as(rotated))


def _of(rule: Scheme, *segments: Segment, training: bool = False) -> Coordinates:
    generator = torch.Generator().manual_seed(0)
    return rule.coordinates(Stream.of([list(segments)]), training=training, generator=generator)


def _inside(rule: Scheme, image: Segment, before: int = 4) -> Tensor:
    """Return the coordinates of a visual segment after some text (axes, k)."""
    return _of(rule, Text(before), image).ids[:, 0, before:]


def _samples(rule: Scheme) -> list[Tensor]:
    """Return coordinates of many kinds, at inference and in training."""
    streams = (
        [Text(3), Image(5, 7), Text(4), _LONG, Text(2)],
        [Text(3), Image(6, 4), Text(1), Image(3, 3), Text(2)],
    )
    return [_of(rule, *s, training=training).ids for s in streams for training in (False, True)]


def _decode_safe(rule: Scheme, image: Segment) -> bool:
    """Return whether generated tokens have the coordinates of the same tokens in a prompt, one step after the last."""
    prompt, longer_prompt = _of(rule, Text(3), image, Text(4)), _of(rule, Text(3), image, Text(9))
    following, last = prompt.decode(5), prompt.ids[..., -2:]
    steady = torch.equal(following[..., 0] - last[..., 1], last[..., 1] - last[..., 0])
    return steady and torch.equal(following, longer_prompt.ids[..., -5:])


def _cost(rule: Scheme, image: Segment) -> float:
    after, before = (_of(rule, *s).decode(1)[0, 0, 0] for s in ([Text(4), image], [Text(4)]))
    return float(after - before)


def _tiles(rule: Scheme) -> tuple[bool, float] | None:
    """Return whether the tokens of an image in tiles differ, and its cost; None if tiles are not supported."""
    try:
        return _distinct(_inside(rule, _TILES)), _cost(rule, _TILES)
    except UnsupportedCombination:
        return None


def _gap(rule: Scheme, image: Segment) -> tuple[float, float]:
    ids = _of(rule, Text(4), image, Text(1)).ids[:, 0]
    gap = ids[:, -1] - ids[:, 4:-1].amax(1)
    return float(gap.min()), float(gap.max())


def _distinct(ids: Tensor) -> bool:
    return len(distinct(ids.T, 0)) == ids.shape[1]


def _rows(image: Tensor) -> list[list[float]]:
    """Return a list of coordinates per axis, sorted so that the order of axes does not matter."""
    return sorted(listed(image.flatten(1)))


def _random(rule: Scheme) -> bool:
    fixed, sampled = (
        _of(rule, *(Text(1), Video(4, 2, 3), Text(1), Image(3, 4)) * 8, training=training)
        for training in (False, True)
    )
    return not torch.equal(fixed.ids, sampled.ids)


def _formula(costs: dict[Size, float]) -> str:
    """Return the formula that fits all costs, or the range of the costs."""

    def fits(rule: Callable[[int, int, int], float]) -> bool:
        return all(abs(cost - rule(*size)) < 1e-9 for size, cost in costs.items())

    for name, rule in _RULES:
        if fits(rule):
            return name
    for name, rule in _RULES[:2]:
        factor = next(iter(costs.values())) / rule(*next(iter(costs)))
        if fits(lambda t, h, w, a=factor, rule=rule: a * rule(t, h, w)):
            return f"{factor:g}" if name == "1" else f"{factor:g} {name}"
    ((t0, _, _), c0), ((t1, _, _), c1) = list(costs.items())[-2:]
    if t0 != t1:  # the videos with the most tokens
        a = (c1 - c0) / (t1 - t0)
        b = c0 - a * t0
        line = f"{'' if a == 1 else f'{a:g} '}t {'+' if b > 0 else '-'} {abs(b):g}"
        if fits(lambda t, h, w: a * t + b):
            return line
        if fits(lambda t, h, w: max(a * t + b, h, w)):
            return f"max({line}, h, w)"
    return f"{min(costs.values()):.3g} to {max(costs.values()):.3g}"
