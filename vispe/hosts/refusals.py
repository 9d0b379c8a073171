"""Why a timm model that is none of the families of vispe cannot take an encoding, and what comes nearest."""

from __future__ import annotations

from torch import nn

_PLAIN = "'vit_base_patch16_224'"
_ROPE = "'vit_base_patch16_rope_224'"
_RELATIVE = "adds a relative position table of its own inside every attention, and its blocks take no mask"
_WINDOWS = "attends inside windows of a grid that shrinks from stage to stage, so one grid does not describe its tokens"

# class name: what keeps it from being converted, and the nearest timm model that can be
_REASONS: dict[str, tuple[str, str]] = {
    "Beit": (_RELATIVE, _PLAIN),
    "VisionTransformerRelPos": (_RELATIVE, _PLAIN),
    "SwinTransformer": (_WINDOWS, _PLAIN),
    "SwinTransformerV2": (_WINDOWS, _PLAIN),
    "SwinTransformerV2Cr": (_WINDOWS, _PLAIN),
    "MultiScaleVit": ("pools queries and keys to different grids in one attention", _PLAIN),
    "VisionTransformerSAM": ("mixes windowed and global attention with decomposed relative tables", _PLAIN),
    "Hiera": (_WINDOWS, _PLAIN),
    "HieraDet": (_WINDOWS, _PLAIN),
    "MaxxVit": (_WINDOWS, _PLAIN),
    "Cait": ("keeps its class token out of the first blocks and mixes heads inside attention", _PLAIN),
    "Xcit": ("attends between channels, where tokens have no distance", _PLAIN),
    "Twins": ("alternates windowed attention with attention to pooled tokens", _PLAIN),
    "PyramidVisionTransformerV2": ("attends from tokens to a pooled grid", _PLAIN),
    "Davit": ("alternates windowed attention with attention between channels", _PLAIN),
    "VOLO": ("mixes outlook attention with two grids of tokens", _PLAIN),
    "CrossVit": ("runs two branches with grids of their own", _PLAIN),
    "LevitDistilled": ("adds a relative position table of its own inside every attention", _PLAIN),
    "Levit": ("adds a relative position table of its own inside every attention", _PLAIN),
}


def refusal(cls: type[nn.Module]) -> str:
    """Return the sentence that says why models of class `cls` are not converted, and what works instead."""
    names = [c.__name__ for c in cls.__mro__]
    reason, nearest = next(
        (_REASONS[n] for n in names if n in _REASONS),
        ("is not a plain stack of transformer blocks that hand a mask to their attention", _PLAIN),
    )
    return (
        f"{cls.__name__} cannot take an encoding of vispe: it {reason}. Nearest: {nearest}, {_ROPE} or "
        "'naflexvit_base_patch16_gap' with pos_embed=...; or vispe.Attention in blocks of your own."
    )
