"""Attention layers of a model: which there are, and vispe's class for each of them."""

from __future__ import annotations

from timm.layers import DiffAttention
from timm.models.vision_transformer import DiffParallelScalingBlock
from torch import nn

from vispe.backbones.local import transformers_attention
from vispe.backbones.local.debiased import DebiasedModel
from vispe.backbones.local.transformers_model import TransformersModel, of_transformers
from vispe.encodings.attention_layer import Attention
from vispe.errors import UnsupportedHost, counted
from vispe.hosts.timm import attention as timm_attention

_STOCK = {ours: stock for stock, ours in timm_attention.SWAPS.items()}


def attention_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (path, module) of every self-attention layer of a ViT, in order.

    Args:
        model: a timm model, an open_clip model or its image tower, a model of transformers, or one with
            `vispe.Attention` layers, with or without an encoding of vispe.

    Raises:
        UnsupportedHost: the model has no such layers, or the maps of one of them cannot be computed.
    """
    if isinstance(model, DebiasedModel) and not model.debiasing.average.is_identity:
        passes = counted(model.debiasing.average.passes, "forward pass")
        raise UnsupportedHost(
            f"The features are a mean over {passes}, so that an image has no single attention map."
        )
    layers = [(path, module) for path, module in model.named_modules() if isinstance(module, Attention)]
    tower, start = tower_of(model)
    if not layers and hasattr(tower, "blocks"):
        layers = [(f"{start}{path}", module) for _, path, module in timm_attention.attentions(tower)]
    elif not layers and hasattr(getattr(tower, "transformer", None), "resblocks"):
        from vispe.hosts.open_clip.attention import attentions

        layers = [(f"{start}{path}", module) for _, path, module in attentions(tower)]
    elif not layers and of_transformers(tower):
        return [(f"{start}{path}", module) for path, module in transformers_attention.attentions(tower)]
    for path, module in layers:
        if reason := _unreadable(module):
            raise UnsupportedHost(f"The attention maps of {path} cannot be computed: {reason}.")
    if not layers:
        raise UnsupportedHost(
            f"The model must have supported attention layers, got {type(model).__name__} without. Use a ViT of timm or "
            "open_clip, or vispe.Attention in your own model."
        )
    return layers


def tower_of(model: nn.Module) -> tuple[nn.Module, str]:
    """Return the image tower of a model, and its path."""
    tower, path = model, ""
    if isinstance(model, DebiasedModel):
        inner, path = tower_of(model.tower)
        return inner, f"tower.{path}"
    if isinstance(model, TransformersModel):
        return model.net, "net."
    for name in ("visual", "trunk"):
        if isinstance(getattr(tower, name, None), nn.Module):
            tower, path = getattr(tower, name), f"{path}{name}."
    return tower, path


def prefix_names(model: nn.Module, prefix: int) -> tuple[str, ...]:
    """Return the names of the prefix tokens: class, distillation, register 1, register 2, ..."""
    tower, _ = tower_of(model)
    # the tokens of NaFlexVit are parameters of `embeds`
    holder = getattr(tower, "embeds", tower)
    first = ("cls_token", "class"), ("class_embedding", "class"), ("dist_token", "distillation")
    names = [word for name, word in first if getattr(holder, name, None) is not None][:prefix]
    kind = "register" if getattr(holder, "reg_token", None) is not None else "prefix"
    return (*names, *(f"{kind} {i + 1}" for i in range(prefix - len(names))))


def stock_type_of(module: nn.Module) -> type[nn.Module]:
    """Return the library's class of an attention layer, converted or not."""
    kind = type(module)
    if kind in _STOCK or kind in timm_attention.SWAPS:
        return _STOCK.get(kind, kind)
    # importing open_clip takes a second, and models of timm do not need it
    from vispe.hosts.open_clip.attention import stock_type

    return stock_type(module)


def swapped_type(kind: type[nn.Module]) -> type[nn.Module] | None:
    """Return vispe's class for a stock class of attention layers; None if there is none."""
    if kind in timm_attention.SWAPS:
        return timm_attention.SWAPS[kind]
    from vispe.hosts.open_clip.attention import SWAPS

    return SWAPS.get(kind)


def _unreadable(module: nn.Module) -> str | None:
    """Return the reason why the maps of an attention layer cannot be computed; None if they can."""
    if isinstance(module, Attention):
        return None
    kind = stock_type_of(module)
    if swapped_type(kind) is None:
        return f"{type(module).__name__} is not a supported attention layer"
    if kind in (DiffAttention, DiffParallelScalingBlock):
        return f"{kind.__name__} subtracts two maps per head"
    if getattr(module, "scaled_cosine", False):
        return "its logits are cosine similarities of queries and keys"
    if isinstance(module, nn.MultiheadAttention) and not module.batch_first:
        return "its inputs are not batch-first; build it with batch_first=True"
    return None
