"""Attention layers of a ViT or a decoder, and the projections of their queries and keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from timm.layers import Attention, AttentionRope
from timm.models.eva import EvaAttention
from torch import nn

from vispe.errors import OptionError, UnsupportedHost
from vispe.hosts.timm.attention import attentions, stock_type

KINDS = (Attention, AttentionRope, EvaAttention)


def attention_layers(model: nn.Module) -> tuple[list[nn.Module], int | None]:
    """Return the attention layers of a model, and the index of the token that is read: 0, -1, or None without one."""
    layers = [m for m in model.modules() if hasattr(m, "layer_idx") and getattr(m, "is_causal", False)]
    if layers and all(hasattr(m, name) for m in layers for name in ("q_proj", "k_proj", "v_proj", "config")):
        return layers, -1
    if layers or not hasattr(model, "blocks"):
        raise UnsupportedHost(
            "Interventions need a timm ViT, or a decoder of transformers with the projections q_proj, k_proj and "
            f"v_proj, got {type(model).__name__}."
        )
    layers = [module for _, _, module in attentions(model)]
    for module in layers:
        # hooks on projections have no effect if a layer uses their weights without calling them
        separate_bias = all(getattr(module, name, None) is not None for name in ("qkv", "q_bias"))
        if stock_type(module) not in KINDS or separate_bias:
            raise UnsupportedHost(
                f"Interventions need queries and keys from linear layers that are called, got {type(module).__name__} "
                f"in {type(model).__name__}."
            )
    token = getattr(getattr(model, "embeds", model), "cls_token", None)
    # prefix tokens may be appended after the first blocks
    late = getattr(model, "_vispe_prefix_from", int)()
    return layers, None if token is None or late else 0


def selected_layers(
    modules: list[nn.Module], layers: Sequence[int] | None, default: Sequence[int]
) -> list[nn.Module]:
    """Return the modules with the indices `layers`, by default `default`; OptionError if one does not exist."""
    indices = list(default if layers is None else layers)
    if invalid := [k for k in indices if not 0 <= k < len(modules)] or ([] if indices else [None]):
        raise OptionError(
            f"Interventions: layers must be within 0 to {len(modules) - 1}, got {invalid[0]} in layers={layers}."
        )
    return [modules[k] for k in sorted(set(indices))]


def query_key_projections(module: Any) -> list[tuple[Any, int | None]]:
    """Return projections, each with the number of features that are queries and keys; None for all features."""
    if getattr(module, "qkv", None) is not None:
        return [(module.qkv, 2 * module.qkv.out_features // 3)]
    return [(module.q_proj, None), (module.k_proj, None)]
