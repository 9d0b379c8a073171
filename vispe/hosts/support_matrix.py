"""Support matrix of encodings and host models, with a reason for each unsupported combination (`vispe info`)."""

from __future__ import annotations

from functools import cache

import torch

from vispe.attention.bias.table import has_grid_table
from vispe.encodings.base import Additive, Biased, Encoding
from vispe.encodings.creation import create_encoding
from vispe.encodings.metadata import encoding_info, list_encodings
from vispe.encodings.registry import encoding_class
from vispe.errors import ShapeError, UnsupportedCombination, counted
from vispe.grid import Grid

HOSTS: dict[str, str] = {
    "vit": "timm VisionTransformer and DeiT",
    "eva": "timm Eva: EVA-02, DINOv3, PE, RoPE-ViT",
    "naflex": "timm NaFlexVit, images",
    "packed": "timm NaFlexVit, packed patches of several grids",
    "open_clip": "open_clip image towers",
    "towers": "vision models of transformers: ViT, DeiT, BEiT, DINOv2, DINOv3 and their like",
    "windows": "SAM, Swin and MaxViT of timm, torchvision's ViT and Swin, transformers' SAM, ViTDet and Swin, MONAI",
    "attention": "vispe.Attention in blocks of your own",
    "other": "timm Beit, relative-position ViTs and all other families",
}
_OTHER = (
    "their attention layers do not support it; use a timm ViT, Eva or NaFlexVit, or vispe.Attention in your own "
    "blocks"
)


def support(name: str) -> dict[str, str | None]:
    """Return, for each host of `HOSTS`, the reason why an encoding is not supported; None if it is.

    Example:
        >>> support('peg')['naflex']
        'it mixes neighbours of one grid between blocks; use a plain timm ViT or Eva'

    Args:
        name: an encoding or one of its presets, with default options. A sampler is combined with
            `rope_axial`, as a sampler alone has no effect.

    Raises:
        UnknownEncoding: there is no such encoding.
    """
    facts = encoding_info(name)
    if "positions" in facts.kinds:
        packed_reason = "it samples positions for one grid at a time; pack samples of equal grids"
        reason = "it samples positions for one grid of all tokens; use a plain timm ViT or Eva"
        return {**support("rope_axial"), "packed": packed_reason, "towers": reason, "windows": reason}
    flat = None
    if 2 not in facts.ndim:
        axes = " or ".join(map(str, facts.ndim))
        remedy = "use list_encodings(ndim=2), or vispe.Attention"
        if "additive" in facts.kinds:
            remedy = "call embed with your own tokens"
        flat = f"it is for {counted(axes, 'axis')} and tokens form a 2-axis grid; {remedy}"
    mixing = None
    if "mixing" in facts.kinds:
        mixing = "it mixes neighbours of one grid between blocks; use a plain timm ViT or Eva"
    outside = None
    if {"additive", "mixing"} & set(facts.kinds):
        outside = "it acts on the tokens outside attention; call embed(x, positions), or mix, yourself"
    inside = flat
    if {"additive", "mixing"} & set(facts.kinds):
        inside = (
            flat
            or "it acts on the tokens outside attention, which these models do not support; use a timm ViT"
        )
    packed_reason = flat or mixing
    if packed_reason is None and _reads_image(name):
        packed_reason = "it reads the image, which packed patches do not contain; pass images to NaFlexVit"
    if packed_reason is None and _for_one_grid(name):
        packed_reason = "its table is computed for one grid at a time; pack samples of equal grids"
    return {
        "vit": flat,
        "eva": flat,
        "naflex": flat or mixing,
        "packed": packed_reason,
        "open_clip": flat,
        "towers": inside,
        "windows": inside,
        "attention": outside or _build_error(name),
        "other": _OTHER,
    }


def support_table(names: list[str] | None = None) -> list[tuple[str, dict[str, str | None]]]:
    """Return (name, `support(name)`) for encodings; default: all.

    Raises:
        UnknownEncoding: there is no such encoding.
    """
    return [(name, support(name)) for name in names or list_encodings()]


@cache
def _for_one_grid(name: str) -> bool:
    """Return whether the encoding resamples inside attention, or has a bias that is a table of one grid."""
    facts = encoding_info(name)
    if not {"bias", "rotary"} & set(facts.kinds):
        return False
    if not facts.extrapolates or encoding_class(name.partition(".")[0]).multi_softmax:
        return True
    return "bias" in facts.kinds and any(_has_table(e) for e in _example(name).parts())


@cache
def _reads_image(name: str) -> bool:
    """Return whether the encoding adds something computed from the image itself."""
    if "additive" not in encoding_info(name).kinds:
        return False
    pos = Grid((2, 3), prefix=1).positions()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            for e in _example(name).parts():
                if isinstance(e, Additive) and not e.reads_tokens:
                    e.table(e.prepare(pos))
        except ShapeError:
            return True
    return False


@cache
def _build_error(name: str) -> str | None:
    """Return why an encoding cannot be built with default options, for example because it requires a mask."""
    try:
        _example(name)
    except UnsupportedCombination as error:
        return str(error)
    return None


def _example(name: str) -> Encoding:
    """Return an encoding for a small model whose width is divisible by every split of channels."""
    with torch.random.fork_rng(devices=[]):
        return create_encoding(name, dim=96, num_heads=4, depth=2, grid=(2, 3))


def _has_table(encoding: Encoding) -> bool:
    if encoding.multi_softmax:  # packed batches do not support the encoding at all
        return True
    if not isinstance(encoding, Biased):
        return False
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        pos = encoding.prepare(Grid((2, 3), prefix=1).positions())
        bias = encoding.bias(pos, 0, torch.zeros(1, pos.tokens, 96))
    return has_grid_table(bias)
