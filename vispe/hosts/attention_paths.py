"""Attention path of each layer of a model (backend and reason), recorded during one forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vispe.attention import explain
from vispe.encodings import attention_layer
from vispe.hosts.common.context import Context

STOCK = "the model's own attention"
OFF = "fused attention of this layer is switched off"


class AttentionPath(NamedTuple):
    """The attention path of one layer.

    Attributes:
        layer: name of the module.
        backend: a backend of `vispe.attention`, or the model's own attention.
        reason: reason why this backend is used.
        unsupported: for each other backend, the reason why it is not used.
    """

    layer: str
    backend: str
    reason: str
    unsupported: dict[str, str]


@torch.no_grad()
def attention_paths(model: nn.Module, *inputs: Any) -> list[AttentionPath]:
    """Return the attention path of every attention layer of a model, in order, for the inputs.

    Layers that vispe has not changed, because the encoding acts outside attention, have the backend "the model's own
    attention". A layer whose softmaxes use different backends has an entry for each.

    Example:
        >>> import timm, torch
        >>> model = timm.create_model('vit_tiny_patch16_224', img_size=32, depth=1, pos_embed='sincos2d')
        >>> attention_paths(model, torch.zeros(1, 3, 32, 32))[0].backend
        "the model's own attention"

    Args:
        model: a converted model of any library; its `forward` is called once.
        *inputs: positional arguments of `forward`.
    """
    paths: dict[str, list[AttentionPath]] = {}
    names: list[str] = []  # the current layer is last

    def record(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Tensor:
        choice = explain(q, k, v, **arguments)
        off = arguments.get("backend") == "reference"  # requested by converted layers that are not fused
        reason = OFF if off else choice.reason
        path, recorded = (
            AttentionPath(names[-1], choice.backend, reason, choice.unsupported),
            paths[names[-1]],
        )
        # the entry of the pre-hook is provisional: the layer does call vispe's attention
        if recorded[0].backend == STOCK:
            recorded.clear()
        if path not in recorded:
            recorded.append(path)
        return attend(q, k, v, **arguments)

    def enter(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            names.append(name)
            values = (*args, *kwargs.values())  # some libraries pass even the tokens by keyword
            tokens = next(a for a in values if isinstance(a, Tensor))
            contexts = [a for a in values if isinstance(a, Context)]
            if contexts and not module.fused_attn:
                paths[name] = [AttentionPath(name, "reference", OFF, {})]
                return
            masked = bool(contexts) and contexts[0].plain_mask(module, tokens) is not None
            reason = (
                "one fixed bias on a small grid, as a dense mask cached with its positions"
                if masked
                else "no encoding acts inside it"
            )
            paths[name] = [AttentionPath(name, STOCK, reason, {})]

        return hook

    attend = attention_layer.attention
    hooked = [(n, m) for n, m in model.named_modules() if _is_attention(m)]
    hooks = [m.register_forward_pre_hook(enter(n), with_kwargs=True) for n, m in hooked]
    with _attention_replaced(record):
        try:
            model(*inputs)
        finally:
            for hook in hooks:
                hook.remove()
    return [path for of_layer in paths.values() for path in of_layer]


@contextmanager
def _attention_replaced(function: Any) -> Iterator[None]:
    """Replace the attention function of the layers by `function` inside the context."""
    original = attention_layer.attention
    attention_layer.attention = function
    try:
        yield
    finally:
        attention_layer.attention = original


def _is_attention(module: nn.Module) -> bool:
    """Return whether a module is an attention layer, of the library or of vispe."""
    if hasattr(module, "vispe_layer"):
        return True
    return "Attention" in type(module).__name__ and hasattr(module, "num_heads")
