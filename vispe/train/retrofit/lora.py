"""Low-rank adaptation (LoRA) of linear layers, which is merged into the weights after training.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685. Every weight W of a block
becomes W + B A with random A (r, in) and zero B (out, r), so training starts from W.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from vispe.errors import UnsupportedHost


class LowRank(nn.Module):
    """Parametrization of a weight as W + B A.

    Args:
        weight: (out, in), for sizes, dtype and device.
        rank: rank r of the update.
    """

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        out, inside = weight.shape
        self.down = nn.Parameter(weight.new_empty(rank, inside))
        self.up = nn.Parameter(weight.new_zeros(out, rank))  # the initial update is 0
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, weight: Tensor) -> Tensor:
        """Return the updated weight (out, in), in its own dtype regardless of autocast."""
        with torch.autocast("cpu" if weight.is_meta else weight.device.type, enabled=False):
            return weight + self.up @ self.down


def add_lora(model: nn.Module, rank: int, layers: Collection[str] | None = None) -> list[str]:
    """Add a low-rank update to every linear weight of the blocks, in place; return the names of the weights.

    The updated weights are those of attention (qkv, or q, k and v, and proj) and of the MLP, but not those of
    encodings. The weights are frozen; the updates require gradients. Random numbers come from torch's global
    generator.

    Args:
        model: model of timm or open_clip, converted or not; with `layers` any model.
        rank: rank of the updates.
        layers: last components of the names of linear layers, such as q_proj, which replace the layers of the blocks.

    Raises:
        UnsupportedHost: the model has no linear layers in blocks, or lacks one of `layers`.
    """
    weights = list(_weights(model) if layers is None else _named(model, layers))
    layer_names = {path.split(".")[-2] for path, _, _ in weights}
    missing = ", ".join(sorted(set(layers or ()) - layer_names))
    if not weights or missing:
        what = f"linear layers called {missing}" if missing else "linear layers in blocks"
        raise UnsupportedHost(f"{type(model).__name__} has no {what}, which LoRA needs.")
    for _, owner, key in weights:
        weight = getattr(owner, key)
        weight.requires_grad_(False)
        parametrize.register_parametrization(owner, key, LowRank(weight.detach(), rank))
    return [path for path, _, _ in weights]


def merge_lora(model: nn.Module) -> nn.Module:
    """Merge the updates into the weights, in place; outputs are bit-identical. Return the model."""
    for module in list(model.modules()):
        if parametrize.is_parametrized(module):
            for key in list(module.parametrizations):
                if isinstance(module.parametrizations[key][0], LowRank):
                    parametrize.remove_parametrizations(module, key, leave_parametrized=True)
    return model


def _named(model: nn.Module, layers: Collection[str]) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield path, owner and key of the weights of linear layers with these names."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and path.split(".")[-1] in layers:
            yield f"{path}.weight", module, "weight"


def _weights(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield path, owner and key of every linear weight of the blocks."""
    for path, module in model.named_modules():
        parts = path.split(".")
        if not {"blocks", "resblocks"} & set(parts) or "pos_enc" in parts:
            continue
        if isinstance(module, nn.Linear):
            yield f"{path}.weight", module, "weight"
        # open_clip: q, k and v in one weight
        elif isinstance(getattr(module, "in_proj_weight", None), nn.Parameter):
            yield f"{path}.in_proj_weight", module, "in_proj_weight"
