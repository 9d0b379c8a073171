"""Test-time registers: an additional token that takes the activations of register neurons (arXiv 2506.08010).

In ViTs without trained registers, few neurons of the MLPs are active on few patches, whose features then have a large
norm and hardly describe their content. At test time, a token of zeros is appended; the largest activation of each such
neuron is moved to it, and the neuron is 0 on all other tokens. Weights do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from vispe.errors import InputError, UnsupportedHost

Neuron = tuple[int, int]
"""Index of a block, and of a hidden unit of its MLP."""

OUTLIER = (
    3.0  # norm of an outlier token relative to the median of its image; ordinary tokens differ by less than 2
)


def check_registers(model: nn.Module) -> None:
    """Raise UnsupportedHost for models whose tokens are not those of timm's `VisionTransformer`."""
    # commands that only recognise names of models do not import timm
    from timm.models.vision_transformer import VisionTransformer

    if type(model) is not VisionTransformer or not all(hasattr(b.mlp, "fc2") for b in model.blocks):
        raise UnsupportedHost(
            f"registers needs a VisionTransformer of timm with its own encoding, got {type(model).__name__}. Use "
            "another method."
        )


def register_intermediates(
    model: nn.Module,
    images: Tensor,
    indices: int | Sequence[int],
    neurons: Sequence[Neuron],
    *,
    norm: bool,
    prefix: bool = False,
) -> list[Any]:
    """Return the maps (b, d, h, w) after some blocks with a test-time register; see `model_access.intermediates`.

    Args:
        model: `VisionTransformer` of timm.
        images: normalised, (b, 3, H, W).
        indices: indices of blocks, or the number of last blocks.
        neurons: register neurons.
        norm: apply the final norm to each map.
        prefix: return pairs of a map and the prefix tokens; the register is not included.
    """
    by_block: dict[int, list[int]] = {}
    for block, unit in neurons:
        by_block.setdefault(block, []).append(unit)
    count = len(model.blocks)
    selected = range(count - indices, count) if isinstance(indices, int) else [k % count for k in indices]
    grid = model.patch_embed.dynamic_feat_size(images.shape[-2:])
    outputs: dict[int, Tensor] = {}
    with ExitStack() as hooks:
        for block, units in by_block.items():
            handle = model.blocks[block].mlp.fc2.register_forward_pre_hook(_shift(units))
            hooks.callback(handle.remove)
        x = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(images))))
        x = torch.cat([x, torch.zeros_like(x[:, :1])], 1)
        for number, block in enumerate(model.blocks):
            x = block(x)
            if number in selected:
                outputs[number] = (model.norm(x) if norm else x)[:, :-1]
    split = model.num_prefix_tokens
    results = []
    for number in selected:
        tokens = outputs[number]
        maps = tokens[:, split:].mT.unflatten(2, tuple(grid)).contiguous()
        results.append((maps, tokens[:, :split]) if prefix and split else maps)
    return results


def _shift(units: Sequence[int]) -> Callable[..., Any]:
    """Return a hook that moves the largest activations of hidden units to the last token."""

    def move(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        del module
        hidden = args[0].clone()
        largest = hidden[:, :-1, units].amax(1)
        hidden[..., units] = 0
        hidden[:, -1, units] = largest
        return (hidden,)

    return move


@torch.no_grad()
def find_register_neurons(model: nn.Module, images: Iterable[Tensor], count: int) -> list[Neuron]:
    """Return the neurons that are most active on outlier tokens, the most active first.

    Outliers are patches whose norm after a block is at least 3 times the median of their image, in the block with the
    largest ratio. The score of a neuron, in this block or before, is the mean absolute activation on outliers.

    Args:
        model: `VisionTransformer` of timm, in evaluation mode.
        images: normalised images (3, H, W).
        count: number of neurons.

    Raises:
        InputError: no image has outliers, so that the model needs no register.
        UnsupportedHost: another kind of model.
    """
    check_registers(model)
    hidden: list[list[Tensor]] = []
    ratios: list[Tensor] = []
    for image in images:
        activations, norms = [], []
        with ExitStack() as hooks:
            for block in model.blocks:
                for module, pre in ((block.mlp.fc2, True), (block, False)):
                    register = module.register_forward_pre_hook if pre else module.register_forward_hook
                    store = activations if pre else norms
                    hooks.callback(register(_storing(store, model.num_prefix_tokens, pre)).remove)
            model.forward_intermediates(image[None], indices=1, intermediates_only=True)
        lengths = torch.stack([tokens.norm(dim=-1) for tokens in norms])  # (blocks, patches)
        hidden.append(activations)
        ratios.append(lengths / lengths.median(1, keepdim=True).values)
    if not ratios:
        raise InputError("registers: images are missing, got none. Pass at least one image.")
    top = int(torch.stack([r.amax(1) for r in ratios]).mean(0).argmax())
    scores = [
        torch.stack([tokens[ratio[top] >= OUTLIER].abs().mean(0) for tokens in activations[: top + 1]])
        for activations, ratio in zip(hidden, ratios, strict=True)
        if bool((ratio[top] >= OUTLIER).any())
    ]
    if not scores:
        largest = max(float(r.max()) for r in ratios)
        raise InputError(
            f"registers: no patch has a norm of {OUTLIER:g} times the median of its image (at most {largest:.1f}). The "
            "model needs no register."
        )
    mean = torch.stack(scores).mean(0)  # (blocks, hidden)
    best = mean.flatten().argsort(descending=True, stable=True)[:count].tolist()
    return [(k // mean.shape[1], k % mean.shape[1]) for k in best]


def _storing(store: list[Tensor], prefix: int, pre: bool) -> Callable[..., None]:
    """Return a hook that appends the patches of the input, or the output, of a module to a list."""

    def append(module: nn.Module, args: tuple[Tensor], *output: Tensor) -> None:
        del module
        store.append((args[0] if pre else output[0])[0, prefix:])

    return append
