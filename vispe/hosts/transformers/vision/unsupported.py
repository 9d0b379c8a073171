"""Reasons why other vision models of transformers do not support encodings."""

from __future__ import annotations

from torch import nn

_QUERIES = (
    "inserts its queries in front of the patches in the last blocks, so blocks have different prefix tokens"
)
_WINDOWS = "moves windows of the image into the batch and back between blocks"

# package of transformers.models: why its towers cannot be converted
REASONS: dict[str, str] = {
    "eomt": _QUERIES,
    "eomt_dinov3": _QUERIES,
    "videomt": _QUERIES,
    "rf_detr": _WINDOWS,
    "lw_detr": _WINDOWS,
    "x_clip": "adds a token with a message from all frames inside every block",
    "data2vec": "adds a relative position table of its own in every block, and its blocks pass no further arguments to "
    "attention",
}


def reason_of(model: nn.Module) -> str | None:
    """Return a sentence with the reason why a model is not supported; None if no reason is known."""
    parts = type(model).__module__.split(".")
    if parts[:2] != ["transformers", "models"] or parts[2] not in REASONS:
        return None
    return f"{type(model).__name__} {REASONS[parts[2]]}."
