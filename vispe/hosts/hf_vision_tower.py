"""transformers' vision towers as they run with a positional encoding of vispe.

Conversion itself is in `vispe.hosts.hf_vision`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_position_ids,
    get_vision_window_index,
)

from vispe.base import Encoding
from vispe.grid import Grid, Positions
from vispe.hosts.context import Context, HostState
from vispe.hosts.fitting import adopted
from vispe.hosts.hf_classes import stock_of
from vispe.hosts.hf_vision_attention import (
    ClipAttention,
    InternAttention,
    InternEncoder,
    InternLayer,
    PackedAttention,
)
from vispe.hosts.hf_vision_chunks import PackedContext, chunks_of, prepared_alike

_logger = logging.getLogger(__name__)


class HostedTower(nn.Module):
    """What every converted vision tower has.

    Attributes:
        vispe: what it remembers.
        pos_enc: the encodings that its blocks share.
    """

    vispe: HostState
    pos_enc: Encoding | None

    def _vispe_shared(self) -> tuple[Encoding, ...]:
        return () if self.pos_enc is None else self.pos_enc.parts()

    def _vispe_all(self) -> tuple[Encoding, ...]:
        """Return the encodings that prepare positions: those of layers too, of which one of each kind counts."""
        return tuple(e for _, encoding in encodings_of(self) for e in encoding.parts())

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        table = family_of(self).table
        if adopted(encodings_of(self), state_dict, prefix) and table and not self.vispe.keep_abs:
            found = [name for name in (f"{prefix}{table}", f"{prefix}{table}.weight") if name in state_dict]
            for name in found:  # a checkpoint of the stock tower
                del state_dict[name]
                _logger.info(
                    "The checkpoint's absolute table is not used: this tower has %s.", self.vispe.spec
                )
        super()._load_from_state_dict(state_dict, prefix, *args)


class PackedTower(HostedTower):
    """The towers of the Qwen family."""

    def forward(self, hidden_states: Tensor, grid_thw: Tensor, **kwargs: Any) -> Any:
        """Return what transformers returns, for the patches of images and videos one after another."""
        ids = get_vision_position_ids(grid_thw, self.spatial_merge_size, kwargs=kwargs)
        ends = get_vision_cu_seqlens(grid_thw, kwargs=kwargs)
        kwargs.update(position_ids=ids, cu_seqlens=ends)
        grids = [(int(t), int(h), int(w)) for t, h, w in grid_thw.tolist()]
        device, state = hidden_states.device, self.vispe
        prepare = prepared_alike(self._vispe_all(), self.training)

        def bound(pos: Positions) -> Context:
            return Context(prepare(pos), self._vispe_shared(), None, False)

        windows, seeing_all = None, ()
        if hasattr(self, "fullatt_block_indexes"):
            order, window_ends = get_vision_window_index(
                grid_thw, self.spatial_merge_size, self.window_size, self.patch_size, kwargs=kwargs
            )
            kwargs.update(window_index=order, cu_window_seqlens=window_ends)
            unit, order = self.spatial_merge_size**2, order.to(ids.device)
            ids = ids.unflatten(0, (-1, unit)).index_select(0, order).flatten(0, 1)
            windows = chunks_of(ids, window_ends, grids, device, bound, state.reference)
            seeing_all = self.fullatt_block_indexes
        whole = chunks_of(ids, ends, grids, device, bound, state.reference)
        context = PackedContext(whole, windows, seeing_all, state.keep_rope)
        return super().forward(hidden_states, grid_thw, vispe_context=context, **kwargs)


class GridTower(HostedTower):
    """Towers that see a batch of images of one size, row by row."""

    def _vispe_context(self, pixel_values: Tensor) -> Context:
        family, patch = family_of(self), _pair(self.embeddings.patch_size)
        shape = (pixel_values.shape[-2] // patch[0], pixel_values.shape[-1] // patch[1])
        grid = Grid(shape, prefix=family.prefix, reference=self.vispe.reference)
        prepare = prepared_alike(self._vispe_all(), self.training)
        return Context(prepare(self.vispe.cache(grid, pixel_values)), self._vispe_shared(), None, False)


class ClipTower(GridTower):
    """The towers of CLIP and SigLIP."""

    def forward(self, pixel_values: Tensor, interpolate_pos_encoding: bool = False, **kwargs: Any) -> Any:
        """Return what transformers returns, for images (b, c, height, width)."""
        context = self._vispe_context(pixel_values)
        return super().forward(
            pixel_values, interpolate_pos_encoding=interpolate_pos_encoding, vispe_context=context, **kwargs
        )


class InternTower(GridTower):
    """The tower of InternVL, whose blocks are run here because its own forward pass hands nothing to them."""

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(self, pixel_values: Tensor, bool_masked_pos: Tensor | None = None, **kwargs: Any) -> Any:
        """Return what transformers returns, for images (b, c, height, width)."""
        del kwargs  # as transformers does, after its decorators have read them
        x = self.embeddings(pixel_values, bool_masked_pos=bool_masked_pos)
        x = self.encoder(x, vispe_context=self._vispe_context(pixel_values)).last_hidden_state
        made = sys.modules[type(self).__module__].InternVLVisionModelOutputWithPooling
        return made(last_hidden_state=self.layernorm(x))


class NoTable(nn.Module):
    """Stands where an absolute table was, and adds nothing.

    Args:
        table: what was there.
    """

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.size = (table.num_embeddings, table.embedding_dim)
        self.register_buffer("zero", table.weight.detach().new_zeros(1), persistent=False)

    @property
    def weight(self) -> Tensor:
        """Zeros, for those who resample the table."""
        return self.zero.expand(self.size)

    def forward(self, ids: Tensor) -> Tensor:
        """Return zeros (..., d) for ids (...)."""
        return self.zero.expand(*ids.shape, self.size[1])


@dataclass(frozen=True)
class Family:
    """Where things are in the towers of one class.

    Attributes:
        module: where the class is, in `transformers.models`.
        tower: its name.
        attention: that of its attention.
        swap: what is put in front of the tower's class.
        swap_attention: what is put in front of that of its attention.
        blocks: path of the blocks.
        attn: name of attention in a block.
        table: path of the absolute table; None where there is none.
        prefix: tokens without a place.
        rope: whether it has a rotary embedding of its own.
        inner: (path, mixin) of other modules that hand the context on; `*` stands for every block.
    """

    module: str
    tower: str
    attention: str
    swap: type[HostedTower] = PackedTower
    swap_attention: type[nn.Module] = PackedAttention
    blocks: str = "blocks"
    attn: str = "attn"
    table: str | None = None
    prefix: int = 0
    rope: bool = True
    inner: tuple[tuple[str, type[nn.Module]], ...] = ()


_ROWS: dict[str, Any] = {"rope": False, "swap": ClipTower, "swap_attention": ClipAttention}
_CLIP = {**_ROWS, "blocks": "encoder.layers", "attn": "self_attn", "table": "embeddings.position_embedding"}
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
        swap=InternTower,
        swap_attention=InternAttention,
        blocks="encoder.layer",
        attn="attention",
        table="embeddings.position_embeddings",
        prefix=1,
        rope=False,
        inner=(("encoder", InternEncoder), ("encoder.layer.*", InternLayer)),
    ),
)


def family_of(tower: nn.Module) -> Family | None:
    """Return where things are in a tower, or None if it is not one that vispe knows."""
    names = {(c.__module__, c.__name__) for c in type(tower).__mro__}
    return next((f for f in FAMILIES if (module_of(f), f.tower) in names), None)


def module_of(family: Family) -> str:
    """Return the module of a family's classes."""
    return f"transformers.models.{family.module}.modeling_{family.module}"


def stock_type(module: nn.Module) -> type[Any]:
    """Return the class that a module has in transformers, whether it is swapped or not."""
    return stock_of(type(module)) or type(module)


def attentions(tower: nn.Module) -> Iterator[tuple[int, str, nn.Module]]:
    """Yield (block, path, module) of every attention layer of a tower."""
    family = family_of(tower)
    for i, block in enumerate(tower.get_submodule(family.blocks)):
        yield i, f"{family.blocks}.{i}.{family.attn}", getattr(block, family.attn)


def encodings_of(tower: nn.Module) -> Iterator[tuple[str, Encoding]]:
    """Yield (path, encoding) of every encoding module of a converted tower."""
    if tower.pos_enc is not None:
        yield "pos_enc", tower.pos_enc
    if tower.vispe.layered:
        for _, path, module in attentions(tower):
            if module.pos_enc is not None:
                yield f"{path}.pos_enc", module.pos_enc


def reference_of(tower: nn.Module) -> tuple[int, ...] | None:
    """Return the grid of the training resolution; None for towers that never had one."""
    side = getattr(tower, "num_grid_per_side", None)
    if side is not None:
        return (side, side)
    if family_of(tower).rope:
        return None
    embeddings = tower.embeddings
    size, patch = _pair(embeddings.image_size), _pair(embeddings.patch_size)
    return (size[0] // patch[0], size[1] // patch[1])


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])
