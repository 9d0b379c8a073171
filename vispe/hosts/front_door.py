"""The front door of timm: `create_model(..., pos_embed='alibi2d')` works once vispe is imported.

timm's ViT classes accept three words for `pos_embed` and fail without a text on any other. Their
constructors are wrapped in place, which serves every entry point and every script, also those that imported
`create_model` earlier. timm's own words pass through untouched.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import timm
import torch
from timm.models import VisionTransformer, deit, vision_transformer
from timm.models.deit import VisionTransformerDistilled
from torch import nn

from vispe.errors import UnsupportedHost
from vispe.hosts.convert import finished, host_terms
from vispe.hosts.timm_convert import convert_vit
from vispe.hosts.timm_vit import HostedViT

_TIMM_WORDS = ("", "none", "learn", None)
_POSITION = (
    list(inspect.signature(VisionTransformer.__init__).parameters).index("pos_embed") - 1
)  # without self

_RELEASE = tuple(int(part) for part in timm.__version__.split(".")[:3] if part.isdigit())
# before 1.0.31 the filter of checkpoints asks for the shape of the model's table, also when there is none
_FILTERS = (vision_transformer, deit) if _RELEASE < (1, 0, 31) else ()


def install() -> None:
    """Wrap the constructors; once is enough, more often does no harm."""
    for cls in (VisionTransformer, VisionTransformerDistilled):
        if not hasattr(cls.__init__, "vispe_original"):
            cls.__init__ = _wrapped(cls, cls.__init__)
    for module in _FILTERS:
        if not hasattr(module.checkpoint_filter_fn, "vispe_original"):
            module.checkpoint_filter_fn = _without_table(module.checkpoint_filter_fn)


def uninstall() -> None:
    """Take the wrappers away again; models that exist keep working."""
    for cls in (VisionTransformer, VisionTransformerDistilled):
        cls.__init__ = getattr(cls.__init__, "vispe_original", cls.__init__)
    for module in _FILTERS:
        original = module.checkpoint_filter_fn
        module.checkpoint_filter_fn = getattr(original, "vispe_original", original)


def _wrapped(cls: type[VisionTransformer], original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: VisionTransformer, *args: Any, **kwargs: Any) -> None:
        given = len(args) > _POSITION
        spec = args[_POSITION] if given else kwargs.get("pos_embed", "learn")
        if isinstance(spec, str | None) and spec in _TIMM_WORDS:
            original(self, *args, **kwargs)
            return
        terms, keep_abs = host_terms(spec)
        if type(self) is not cls:
            raise UnsupportedHost(
                f"{type(self).__name__}, a subclass of timm's {cls.__name__}, was built with pos_embed={spec!r}, but "
                "only its own constructor knows when it is complete; build it with pos_embed='none' and then call "
                "vispe.convert(model, ...)."
            )
        word = "learn" if keep_abs else "none"
        if given:
            args = (*args[:_POSITION], word, *args[_POSITION + 1 :])
        else:
            kwargs["pos_embed"] = word
        original(self, *args, **kwargs)
        convert_vit(self, terms, keep_abs, built=True, sources=finished(spec))

    __init__.vispe_original = original
    return __init__


def _without_table(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(original)
    def checkpoint_filter_fn(
        state_dict: dict[str, Any], model: VisionTransformer, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        if not isinstance(model, HostedViT) or model.pos_embed is not None:
            return original(state_dict, model, *args, **kwargs)
        entries = model.patch_embed.num_patches + (0 if model.no_embed_class else model.num_prefix_tokens)
        model.pos_embed = nn.Parameter(torch.empty(1, entries, model.embed_dim, device="meta"))
        try:
            found = original(state_dict, model, *args, **kwargs)
        finally:
            model.pos_embed = None
        found.pop("pos_embed", None)
        return found

    checkpoint_filter_fn.vispe_original = original
    return checkpoint_filter_fn
