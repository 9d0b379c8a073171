"""Where things are in transformers' vision towers: attention, absolute table, rotary embedding, training grid."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from vispe.errors import UnsupportedCombination
from vispe.hosts.transformers.classes import stock_of
from vispe.hosts.transplant.fitting import moved


@dataclass(frozen=True)
class Family:
    """Where things are in the towers of one class.

    Attributes:
        module: where the class is, in `transformers.models`.
        tower: its name.
        attention: that of its attention.
        kind: how a context reaches attention, see `vispe.hosts.transformers.vision.tower.SWAPS`.
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
FAMILIES = (
    Family("qwen2_vl", "Qwen2VisionTransformerPretrainedModel", "VisionAttention"),
    Family("qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel", "Qwen2_5_VLVisionAttention"),
    Family("qwen3_vl", "Qwen3VLVisionModel", "Qwen3VLVisionAttention", table="pos_embed"),
    Family("qwen3_vl_moe", "Qwen3VLMoeVisionModel", "Qwen3VLMoeVisionAttention", table="pos_embed"),
    Family("clip", "CLIPVisionModel", "CLIPAttention", prefix=1, **_CLIP),
    Family("siglip", "SiglipVisionModel", "SiglipAttention", **_CLIP),
    Family(
        "internvl",
        "InternVLVisionModel",
        "InternVLVisionAttention",
        kind="intern",
        blocks="encoder.layer",
        attn="attention",
        table="embeddings.position_embeddings",
        prefix=1,
        rope=False,
    ),
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


def table_of(tower: nn.Module) -> Any:
    """Return the absolute table that is in use, or None."""
    if family_of(tower).table is None:
        return None
    holder, name = _holder(tower)
    table = getattr(holder, name)
    return None if isinstance(table, NoTable) else table


def take_table(tower: nn.Module) -> Any:
    """Take the absolute table out and return it."""
    holder, name = _holder(tower)
    table = getattr(holder, name)
    if isinstance(table, nn.Parameter):
        holder.register_parameter(name, None)
    else:
        setattr(holder, name, NoTable(table))
    return table


def put_table(tower: nn.Module, table: Any) -> None:
    """Put the absolute table back, on the device and in the dtype that the tower has now."""
    holder, name = _holder(tower)
    like = next(tower.parameters())
    is_parameter = isinstance(table, nn.Parameter)
    setattr(holder, name, moved(table, like) if is_parameter else table.to(like.device, like.dtype))


def check_values(tower: nn.Module, table: Any) -> None:
    """Raise when a table that was taken out never got values, as the weights were saved without it."""
    weight = table if isinstance(table, nn.Parameter | None) else table.weight
    if weight is not None and weight.is_meta and not next(tower.parameters()).is_meta:
        raise UnsupportedCombination(
            f"This {stock_type(tower).__name__} was saved without its absolute table, so there is none to bring back; "
            "load the stock model that it was made from."
        )


def _holder(tower: nn.Module) -> tuple[nn.Module, str]:
    """Return the module that holds the absolute table, and its name there."""
    path, _, name = family_of(tower).table.rpartition(".")
    return tower.get_submodule(path), name
