"""Families of vision-language models by model type: how images are located, and the scheme of their training.

Properties of the language model itself are detected in `rotary_detection`. The tables contain properties that cannot
be detected: one entry per model type, with an `ImageRule`, whose function locates images in the tokens of a call.

To add a family, find the rule that returns the blocks of its images, or write a function from `CallTokens` to
`ImageBlocks`, and add an entry to the table of its file, with the scheme of its training unless it is ``rope1d``.
"""

from __future__ import annotations

from typing import Any

from vispe.hosts.transformers.language.families.base import LanguageFamily
from vispe.hosts.transformers.language.families.grids import GRID_FAMILIES
from vispe.hosts.transformers.language.families.patches import PATCH_FAMILIES
from vispe.hosts.transformers.language.families.sizes import SIZE_FAMILIES
from vispe.hosts.transformers.language.families.squares import SQUARE_FAMILIES
from vispe.hosts.transformers.language.families.tiles import TILE_FAMILIES
from vispe.hosts.transformers.language.families.views import VIEW_FAMILIES

FAMILIES: dict[str, LanguageFamily] = (
    GRID_FAMILIES | SIZE_FAMILIES | SQUARE_FAMILIES | PATCH_FAMILIES | TILE_FAMILIES | VIEW_FAMILIES
)


def language_model_of(inner: Any) -> Any:
    """Return the language model inside a model without its head, or None."""
    if hasattr(inner, "language_model"):
        return inner.language_model
    # in other models, such as CLIP, text_model is a text tower
    known = getattr(getattr(inner, "config", None), "model_type", None) in FAMILIES
    return getattr(inner, "text_model", None) if known else None


def model_inside(model: Any) -> Any:
    """Return the model without its head."""
    return model.model if language_model_of(getattr(model, "model", None)) is not None else model


def family_of(config: Any) -> LanguageFamily:
    """Return the family, one of `FAMILIES`, for the configuration of a model without its head."""
    return FAMILIES[config.model_type]
