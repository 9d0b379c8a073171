"""Forward passes whose attention layers are observed by hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vispe.attention.call import Call
from vispe.backbones.attention_recorder.calls import first_sample, recorded_call
from vispe.backbones.attention_recorder.layers import attention_layers, tower_of
from vispe.backbones.attention_recorder.observation import LayerAttention, grid_of, observed
from vispe.backbones.local import transformers_attention
from vispe.backbones.local.transformers_model import of_transformers, run
from vispe.errors import OptionError
from vispe.grid import Grid


@torch.no_grad()
def record_attention(
    model: nn.Module,
    images: Tensor,
    on_layer: Callable[[LayerAttention], None],
    go: Callable[[], object] | None = None,
) -> None:
    """Run a model on images, and call `on_layer` for every attention layer during the forward pass.

    Args:
        model: model of timm, open_clip or transformers, or with `vispe.Attention` layers; in evaluation mode.
        images: (b, 3, H, W) on the model's device; for language models of transformers token ids (b, n).
        on_layer: called with each layer; it should accumulate statistics and not store maps.
        go: function that runs the model on these images, for callers that need its output.

    Raises:
        OptionError: the model is in training mode.
        UnsupportedHost: the model has no attention layers, or the maps of one of them cannot be computed.
        ShapeError: the tokens are not prefix tokens followed by the patches of the image.

    >>> import timm
    >>> from vispe.backbones.attention_recorder import attention_map
    >>> def show(layer: LayerAttention) -> None:
    ...     print(layer.path, tuple(attention_map(layer.call)[1].shape))
    >>> record_attention(timm.create_model("test_vit", depth=1).eval(), torch.zeros(1, 3, 160, 160), show)
    blocks.0.attn (1, 2, 101, 101)
    """
    check_evaluation(model)
    tower, _ = tower_of(model)
    with reading_attention(model, images, on_layer):
        if go is not None:
            go()
        elif of_transformers(tower):
            run(tower, images)
        else:
            getattr(tower, "forward_features", tower)(images)


def check_evaluation(model: nn.Module) -> None:
    """Raise `OptionError` if a model is in training mode."""
    if model.training:
        raise OptionError(
            "The model must be in evaluation mode, as attention is random in training mode. Call model.eval() first."
        )


@contextmanager
def reading_attention(
    model: nn.Module, images: Tensor, on_layer: Callable[[LayerAttention], None], *, first: bool = False
) -> Iterator[None]:
    """Call `on_layer` for every attention layer of a forward pass that runs inside the context; without gradients.

    Args:
        model: model of timm, open_clip or transformers, or with `vispe.Attention` layers.
        images: (b, 3, H, W), of which only the size is used; for language models token ids (b, n).
        on_layer: called with each layer.
        first: observe the first sample of the batch only.

    Raises:
        UnsupportedHost: the model has no attention layers, or the maps of one of them cannot be computed.
        ShapeError: the tokens are not prefix tokens followed by the patches of the image.
    """
    layers = attention_layers(model)
    tower, _ = tower_of(model)
    size = tuple(images.shape[-2:])
    with ExitStack() as handles:
        if of_transformers(tower):
            numbers = {module: (number, path) for number, (path, module) in enumerate(layers)}

            @torch.no_grad()
            def on_call(module: nn.Module, call: Call, x: Tensor) -> None:
                if first:
                    mask = None if call.attn_mask is None else call.attn_mask[:1]
                    call = replace(call, q=call.q[:1], k=call.k[:1], v=call.v[:1], attn_mask=mask)
                    x = x[:1]
                grid = grid_of(tower, size, x.shape[1]) if images.ndim == 4 else Grid((1, x.shape[1]))
                on_layer(observed(*numbers[module], call, x, grid))

            handles.enter_context(transformers_attention.reading(list(numbers), on_call))
        for number, (path, module) in enumerate(layers):
            hook = _hook(tower, size, number, path, on_layer, first)
            handles.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield


def _hook(
    tower: nn.Module,
    size: tuple[int, ...],
    number: int,
    path: str,
    on_layer: Callable[[LayerAttention], None],
    first: bool,
) -> Callable[..., None]:
    @torch.no_grad()
    def describe(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if first:
            args, kwargs = first_sample(path, args, kwargs)
        recorded = recorded_call(module, args, kwargs, of_transformers(tower))
        if recorded is None:
            return
        call, x, pos, rotation = recorded
        grid = pos.grid if pos is not None and pos.grid is not None else grid_of(tower, size, x.shape[1])
        on_layer(observed(number, path, call, x, grid, rotation))

    return describe
