"""Where things are in transformers' vision towers: attention, absolute table, rotary embedding, training grid."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from vispe.hosts.transformers.classes import stock_of


@dataclass(frozen=True)
class Family:
    """Where things are in the towers of one class.

    Attributes:
        module: where the class is, in `transformers.models`.
        tower: its name.
        attention: that of its attention.
        kind: how a context reaches attention, one of the names in `SWAPS` of the towers.
        blocks: path of the blocks.
        attn: name of attention in a block.
        table: path of the absolute table; None where there is none.
        prefix: tokens without a place.
        rope: whether it has a rotary embedding of its own.
    """

    module: str
    tower: str
    attention: str
    kind: str = "packed"
    blocks: str = "blocks"
    attn: str = "attn"
    table: str | None = None
    prefix: int = 0
    rope: bool = True

    @property
    def path(self) -> str:
        """The module of its classes."""
        return f"transformers.models.{self.module}.modeling_{self.module}"


_CLIP: dict[str, Any] = {"kind": "clip", "blocks": "encoder.layers", "attn": "self_attn", "rope": False}
_CLIP["table"] = "embeddings.position_embedding"
_INTERN: dict[str, Any] = {"kind": "intern", "blocks": "encoder.layer", "attn": "attention", "rope": False}
_INTERN["table"] = "embeddings.position_embeddings"
FAMILIES = (
    Family("qwen2_vl", "Qwen2VisionTransformerPretrainedModel", "VisionAttention"),
    Family("qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel", "Qwen2_5_VLVisionAttention"),
    Family("qwen3_vl", "Qwen3VLVisionModel", "Qwen3VLVisionAttention", table="pos_embed"),
    Family("qwen3_vl_moe", "Qwen3VLMoeVisionModel", "Qwen3VLMoeVisionAttention", table="pos_embed"),
    Family("clip", "CLIPVisionModel", "CLIPAttention", prefix=1, **_CLIP),
    Family("siglip", "SiglipVisionModel", "SiglipAttention", **_CLIP),
    Family("internvl", "InternVLVisionModel", "InternVLVisionAttention", prefix=1, **_INTERN),
)


class NoTable(nn.Module):
    """Stands where an absolute table was, and adds nothing; of its buffer only device and dtype count.

    Args:
        table: what was there.
    """

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.size = (table.num_embeddings, table.embedding_dim)
        self.register_buffer("zero", table.weight.detach().new_zeros(1), persistent=False)

    @property
    def weight(self) -> Tensor:
        """Zeros, new every time: they are resampled, and transformers may initialise them."""
        return self.zero.new_zeros(self.size)

    def forward(self, ids: Tensor) -> Tensor:
        """Return zeros (..., d) for ids (...)."""
        return self.zero.new_zeros(1).expand(*ids.shape, self.size[1])


def family_of(tower: nn.Module) -> Family | None:
    """Return where things are in a tower, or None if it is not one that vispe knows."""
    return family_of_class(type(tower))


def family_of_class(cls: type[Any]) -> Family | None:
    """Return where things are in towers of a class, or None if it is not one that vispe knows."""
    names = {(c.__module__, c.__name__) for c in cls.__mro__}
    return next((f for f in FAMILIES if (f.path, f.tower) in names), None)


def stock_type(module: nn.Module) -> type[Any]:
    """Return the class that a module has in transformers, whether it is swapped or not."""
    return stock_of(type(module)) or type(module)


def attentions(tower: nn.Module) -> Iterator[tuple[int, str, nn.Module]]:
    """Yield (block, path, module) of every attention layer of a tower."""
    family = family_of(tower)
    for i, block in enumerate(tower.get_submodule(family.blocks)):
        yield i, f"{family.blocks}.{i}.{family.attn}", getattr(block, family.attn)


def reference_of(tower: nn.Module) -> tuple[int, ...] | None:
    """Return the grid of the training resolution; None for towers that never had one."""
    side = getattr(tower, "num_grid_per_side", None)
    if side is not None:
        return (side, side)
    if family_of(tower).rope:
        return None
    embeddings = tower.embeddings
    size, patch = pair(embeddings.image_size), pair(embeddings.patch_size)
    return (size[0] // patch[0], size[1] // patch[1])


def pair(size: Any) -> tuple[int, int]:
    """Return height and width, which are given as one number where they are equal."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def table_holder(tower: nn.Module) -> tuple[nn.Module, str]:
    """Return the module that holds the absolute table, and its name there."""
    path, _, name = family_of(tower).table.rpartition(".")
    return tower.get_submodule(path), name
