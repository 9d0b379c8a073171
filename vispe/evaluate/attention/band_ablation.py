"""What a model does when rotary pairs of low rank are left unrotated, as DoPE leaves them; nothing is trained."""

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
from vispe.errors import OptionError, ShapeError, UnsupportedHost


def band_mask(ranks: Tensor, share: float) -> Tensor:
    """Return which pairs to leave unrotated, bool like `ranks`: the share with the lowest ranks, NaN never.

    Args:
        ranks: of bands, (pairs,), (h, pairs) or (layers, h, pairs).
        share: of all bands, rounded to whole bands.

    Raises:
        OptionError: the share is not in [0, 1].

    >>> band_mask(torch.tensor([1.9, 1.1, 1.4, 1.8]), 0.25)
    tensor([False,  True, False, False])
    """
    if not 0 <= share <= 1:
        raise OptionError(f"band_mask needs a share of bands between 0 and 1, got {share}.")
    flat = ranks.flatten().nan_to_num(math.inf)
    lowest = flat.argsort(stable=True)[: round(share * len(flat))]
    mask = torch.zeros_like(flat, dtype=torch.bool).index_fill_(0, lowest, True)
    return (mask & flat.isfinite()).view_as(ranks)


@contextmanager
def unrotated(model: nn.Module, mask: Tensor) -> Iterator[None]:
    """Leave pairs of channels of a converted model unrotated inside a `with`; its outputs afterwards are as before.

    Args:
        model: with rotary encodings of vispe that turn pairs.
        mask: bool, True for pairs that do not turn: (pairs,), (h, pairs), or (layers, h, pairs) for every block.

    Raises:
        UnsupportedHost: it has no such encoding.
        ShapeError: inside, where the mask does not fit the rotation.

    >>> import timm, vispe
    >>> model = vispe.convert(timm.create_model("test_vit", depth=1).eval(), "rope_axial")
    >>> picture = torch.randn(1, 3, 160, 160)
    >>> before = model(picture)
    >>> with unrotated(model, torch.ones(16, dtype=torch.bool)):
    ...     bool((model(picture) == before).all())
    False
    >>> bool((model(picture) == before).all())
    True
    """
    found = [m for m in model.modules() if isinstance(m, Rotary) and not m.calibrates]
    if not found:
        raise UnsupportedHost(
            f"{type(model).__name__} has no rotary encoding of vispe; convert it to one, such as 'rope_axial', first."
        )
    own = {m: m.transform for m in found}
    try:
        for m in found:
            # an attribute of the object hides the method of its class until it is deleted
            m.__dict__["transform"] = lambda pos, layer, x=None, made=own[m]: _stilled(
                made(pos, layer, x), mask[layer] if mask.ndim == 3 else mask
            )
        yield
    finally:
        for m in found:
            m.__dict__.pop("transform", None)


def _stilled(transform: Transform, mask: Tensor) -> Transform:
    if isinstance(transform, Chain):
        return Chain(*(_stilled(link, mask) for link in transform.links))
    if not isinstance(transform, PairRotation):
        return transform
    heads, pairs = transform.cos.shape[1], transform.cos.shape[-1]
    if mask.shape[-1] != pairs or (mask.ndim == 2 and heads > 1 and len(mask) != heads):
        raise ShapeError(
            f"A mask of bands for {heads} heads with {pairs} pairs must be (pairs,), (h, pairs) or (layers, h, pairs), "
            f"got {tuple(mask.shape)} for a layer."
        )
    still = (mask if mask.ndim == 1 else mask[:, None]).to(transform.cos.device)

    def tables(turn: PairRotation) -> tuple[Tensor, Tensor]:
        return turn.cos.where(~still, 1.0), turn.sin.where(~still, 0.0)

    keys = None if transform.of_keys is transform else tables(transform.of_keys)
    return PairRotation(*tables(transform), transform.layout, transform.values, keys)
