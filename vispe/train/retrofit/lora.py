"""Low-rank changes of linear layers (LoRA): few weights are trained beside frozen ones, and merged at the end.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685. Every weight W of a block
becomes W + B A with A (r, in) drawn at random and B (out, r) zero, so training starts from W.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from vispe.errors import UnsupportedHost


class LowRank(nn.Module):
    """A weight plus a product of two thin matrices.

    Args:
        weight: (out, in), for sizes, dtype and device.
        rank: of the change.
    """

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        out, inside = weight.shape
        self.down = nn.Parameter(weight.new_empty(rank, inside))
        self.up = nn.Parameter(weight.new_zeros(out, rank))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, weight: Tensor) -> Tensor:
        """Return the changed weight, in its own precision whatever autocast says."""
        with torch.autocast("cpu" if weight.is_meta else weight.device.type, enabled=False):
            return weight + self.up @ self.down


def add_lora(model: nn.Module, rank: int, layers: Collection[str] | None = None) -> list[str]:
    """Put a low-rank change beside every linear weight of the blocks, in place; return the names of the weights.

    Weights of attention (qkv, or q, k and v, and proj) and of the MLP take part, those of encodings do not. The weights
    themselves are frozen, the changes require gradients. The draws come from torch's global generator.

    Args:
        model: of timm or open_clip, converted or not; with `layers` any model.
        rank: of the changes.
        layers: last parts of the names of linear layers, such as q_proj, which get a change wherever they are, and
            those of blocks do not.

    Raises:
        UnsupportedHost: the model has no linear layer in blocks, or lacks one that `layers` names.
    """
    chosen = list(_weights(model) if layers is None else _named(model, layers))
    found = {path.split(".")[-2] for path, _, _ in chosen}
    missing = ", ".join(sorted(set(layers or ()) - found))
    if not chosen or missing:
        what = f"linear layers called {missing}" if missing else "linear layers in blocks"
        raise UnsupportedHost(f"{type(model).__name__} has no {what} to which lora could be added.")
    for _, owner, key in chosen:
        weight = getattr(owner, key)
        weight.requires_grad_(False)
        parametrize.register_parametrization(owner, key, LowRank(weight.detach(), rank))
    return [path for path, _, _ in chosen]


def merge_lora(model: nn.Module) -> nn.Module:
    """Write the changed weights into plain ones, in place: outputs stay the same bit for bit; return the model."""
    for module in list(model.modules()):
        if parametrize.is_parametrized(module):
            for key in list(module.parametrizations):
                if isinstance(module.parametrizations[key][0], LowRank):
                    parametrize.remove_parametrizations(module, key, leave_parametrized=True)
    return model


def _named(model: nn.Module, layers: Collection[str]) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield path, owner and key of the weights of linear layers of some names."""
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
        # open_clip: q, k and v as one
        elif isinstance(getattr(module, "in_proj_weight", None), nn.Parameter):
            yield f"{path}.in_proj_weight", module, "in_proj_weight"
