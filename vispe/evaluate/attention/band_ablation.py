"""Inference with low-rank rotary pairs left unrotated, as in DoPE (denoising rotary position embedding)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vispe.attention.transform.abstract_transform import Transform
from vispe.attention.transform.chain import Chain
from vispe.attention.transform.pairs import PairRotation
from vispe.encodings.base import Rotary
from vispe.errors import ShapeError, UnsupportedHost, counted
from vispe.utils.options import UnitInterval, checked


@checked
def band_mask(ranks: Tensor, share: UnitInterval) -> Tensor:
    """Return the pairs to leave unrotated, bool with the shape of `ranks`: those with the lowest ranks, never NaN.

    Args:
        ranks: ranks of rotary pairs, (pairs,), (h, pairs) or (layers, h, pairs).
        share: fraction of all bands, rounded to an integer number of bands.

    Raises:
        OptionError: the fraction is not in [0, 1].

    >>> band_mask(torch.tensor([1.9, 1.1, 1.4, 1.8]), 0.25)
    tensor([False,  True, False, False])
    """
    flat = ranks.flatten().nan_to_num(math.inf)
    lowest = flat.argsort(stable=True)[: round(share * len(flat))]
    mask = torch.zeros_like(flat, dtype=torch.bool).index_fill_(0, lowest, True)
    return (mask & flat.isfinite()).view_as(ranks)


@contextmanager
def unrotated(model: nn.Module, mask: Tensor) -> Iterator[None]:
    """Context manager that leaves channel pairs of a converted model unrotated; the model is restored on exit.

    Args:
        model: a model with rotary encodings of vispe.
        mask: bool, True for unrotated pairs: (pairs,), (h, pairs), or (layers, h, pairs) for every block.

    Raises:
        UnsupportedHost: the model has no such encoding.
        ShapeError: in the forward pass, if the mask does not fit the rotation.

    >>> import timm, vispe
    >>> model = vispe.convert(timm.create_model("test_vit", depth=1).eval(), "rope_axial")
    >>> image = torch.randn(1, 3, 160, 160)
    >>> before = model(image)
    >>> with unrotated(model, torch.ones(16, dtype=torch.bool)):
    ...     bool((model(image) == before).all())
    False
    >>> bool((model(image) == before).all())
    True
    """
    encodings = [m for m in model.modules() if isinstance(m, Rotary) and not m.scales_channels]
    if not encodings:
        raise UnsupportedHost(
            f"unrotated: {type(model).__name__} has no rotary encoding of vispe. Convert it to one first, such as "
            "'rope_axial'."
        )
    originals = {m: m.transform for m in encodings}
    try:
        for m in encodings:
            # an instance attribute shadows the method of the class until it is deleted
            m.__dict__["transform"] = lambda pos, layer, x=None, original=originals[m]: _without_pairs(
                original(pos, layer, x), mask[layer] if mask.ndim == 3 else mask
            )
        yield
    finally:
        for m in encodings:
            m.__dict__.pop("transform", None)


def _without_pairs(transform: Transform, mask: Tensor) -> Transform:
    if isinstance(transform, Chain):
        return Chain(*(_without_pairs(link, mask) for link in transform.links))
    if not isinstance(transform, PairRotation):
        return transform
    heads, pairs = transform.cos.shape[1], transform.cos.shape[-1]
    if mask.shape[-1] != pairs or (mask.ndim == 2 and heads > 1 and len(mask) != heads):
        raise ShapeError(
            f"unrotated: mask must be (pairs,), (h, pairs) or (layers, h, pairs) for {counted(heads, 'head')} with "
            f"{counted(pairs, 'pair')}, got {tuple(mask.shape)} for a layer. Use the shape of `band_ranks`."
        )
    unrotated_pairs = (mask if mask.ndim == 1 else mask[:, None]).to(transform.cos.device)

    def tables(rotation: PairRotation) -> tuple[Tensor, Tensor]:
        return rotation.cos.where(~unrotated_pairs, 1.0), rotation.sin.where(~unrotated_pairs, 0.0)

    keys = None if transform.of_keys is transform else tables(transform.of_keys)
    return PairRotation(*tables(transform), transform.layout, transform.values, keys)
