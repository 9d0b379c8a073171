"""Monkey patches of timm's checkpoint functions: models without an absolute table, and metadata of state dicts.

Like `vispe.hosts.timm.patch_constructors`, this module is imported together with timm.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import timm
import timm.models
import torch
from timm.models import VisionTransformer, deit, vision_transformer
from torch import nn

from vispe.hosts.monkeypatch import Patch

_RELEASE = tuple(int(part) for part in timm.__version__.split(".")[:3] if part.isdigit())
# before 1.0.31 the checkpoint filter reads the shape of the model's table, even when there is none
_FILTERS = (vision_transformer, deit) if _RELEASE < (1, 0, 31) else ()


def checkpoint_patches() -> Iterator[Patch]:
    """Yield the patches of timm's checkpoint functions."""
    yield from (Patch(module, "checkpoint_filter_fn", _with_temporary_table) for module in _FILTERS)
    # this function removes prefixes of wrappers, and thereby the metadata of the state dict
    yield Patch(sys.modules[timm.models.load_checkpoint.__module__], "clean_state_dict", _with_metadata)


def _with_temporary_table(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Wrap timm's checkpoint filter: a model without an absolute table gets one on the meta device during the call."""

    def checkpoint_filter_fn(
        state_dict: dict[str, Any], model: VisionTransformer, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        from vispe.hosts.timm.vit import ConvertedViT

        if not isinstance(model, ConvertedViT) or model.pos_embed is not None:
            return original(state_dict, model, *args, **kwargs)
        entries = model.patch_embed.num_patches + (0 if model.no_embed_class else model.num_prefix_tokens)
        model.pos_embed = nn.Parameter(torch.empty(1, entries, model.embed_dim, device="meta"))
        try:
            filtered = original(state_dict, model, *args, **kwargs)
        finally:
            model.pos_embed = None
        filtered.pop("pos_embed", None)
        return filtered

    return checkpoint_filter_fn


def _with_metadata(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Wrap timm's removal of wrapper prefixes: the metadata of the state dict is preserved."""

    def clean_state_dict(state_dict: dict[str, Any]) -> dict[str, Any]:
        cleaned = OrderedDict(original(state_dict))
        metadata = getattr(state_dict, "_metadata", None)
        if metadata is not None:
            cleaned._metadata = {
                next(iter(original({f"{name}.": None}))).removesuffix("."): entry
                for name, entry in metadata.items()
            }
        return cleaned

    return clean_state_dict
