"""Rotary layer for serving engines that looks up table rows per axis and pair."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from vispe.attention.transform.abstract_transform import Layout
from vispe.attention.transform.pairs import PairRotation
from vispe.errors import InputError, ShapeError, counted
from vispe.multimodal.serving.table import RotaryTable

ENGINE = "MRotaryEmbedding"  # class of vLLM and SGLang that supports sections of axes


class TableRotary(nn.Module):
    """Rotary layer for queries and keys in an engine, with the interface of the rotary layers of vLLM and SGLang.

    Implemented in plain torch: it supports every scheme, but is slower than an engine's fused kernels, which
    need sections.

    Args:
        table: cosines and sines, and the axis of each pair.
        head_size: channels of a head; those beyond ``2 pairs`` are unchanged.
        layout: which channels are pairs, `'half'` (called neox in engines) or `'interleaved'`.

    Raises:
        ShapeError: a head has fewer channels than are rotated.
    """

    def __init__(self, table: RotaryTable, head_size: int, layout: Layout = "half") -> None:
        super().__init__()
        self.head_size = head_size
        self.layout: Layout = layout
        self.rotary_dim = table.cache.shape[1]
        if self.rotary_dim > head_size:
            raise ShapeError(
                f"The table rotates {counted(self.rotary_dim, 'channel')}, but a head has {head_size}."
            )
        self.cos_sin_cache: Tensor
        self.axis_of_pair: Tensor
        self.register_buffer("cos_sin_cache", table.cache, persistent=False)
        self.register_buffer("axis_of_pair", table.axis_of_pair, persistent=False)

    def forward(self, positions: Tensor, query: Tensor, key: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        """Return the rotated queries and keys.

        Args:
            positions: rows of the table, (tokens,) if all axes are equal, else (axes, tokens).
            query: (tokens, heads * head_size).
            key: (tokens, key heads * head_size).
        """
        cos, sin = self.looked_up(positions)
        return self._rotated(query, cos, sin), self._rotated(key, cos, sin)

    def looked_up(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of tokens (tokens, pairs) each."""
        if positions.ndim == 1:
            cos, sin = self.cos_sin_cache[positions].chunk(2, 1)
            return cos, sin
        row = positions.index_select(0, self.axis_of_pair).T  # (tokens, pairs)
        pair = torch.arange(len(self.axis_of_pair), device=row.device)
        return self.cos_sin_cache[row, pair], self.cos_sin_cache[row, pair + len(self.axis_of_pair)]

    def _rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = x.view(len(x), -1, self.head_size).transpose(0, 1)[None]  # (1, heads, tokens, channels)
        rotated = PairRotation(cos[None, None], sin[None, None], self.layout).query(heads)
        return rotated[0].transpose(0, 1).reshape(x.shape)


def install(model: nn.Module, table: RotaryTable) -> list[str]:
    """Install a table in the rotary layers of an engine's model, and return the names of these layers.

    Layers of the class `MRotaryEmbedding`, of vLLM or SGLang, keep their kernels if sections define the axis of each
    pair; otherwise, and for other layers with a table and sections, they are replaced by a `TableRotary`.

    Raises:
        InputError: no layer has both sections and a table of cosines and sines.
        ShapeError: a layer rotates a different number of channels.
    """
    layers: list[tuple[nn.Module, str, str]] = [
        (parent, name, f"{path}.{name}".lstrip("."))
        for path, parent in cast(
            "Iterable[tuple[str, nn.Module]]", model.named_modules(remove_duplicate=False)
        )
        for name, layer in parent.named_children()
        if hasattr(layer, "cos_sin_cache") and getattr(layer, "mrope_section", None)
    ]
    if not layers:
        raise InputError(
            f"{type(model).__name__} has no layer with cos_sin_cache and mrope_section, which engines create if the "
            "model configuration has mrope_section in its rope parameters. Add it, see the table."
        )
    replacements: dict[int, nn.Module] = {}
    for parent, name, path in layers:
        layer: Any = getattr(parent, name)
        if id(layer) not in replacements:
            replacements[id(layer)] = _fitted(layer, table, path)
        setattr(parent, name, replacements[id(layer)])
    return [path for _, _, path in layers]


def _fitted(layer: Any, table: RotaryTable, path: str) -> nn.Module:
    """Return a layer with the table: the layer itself if its kernel supports the table, else a new layer."""
    if layer.rotary_dim != table.cache.shape[1]:
        raise ShapeError(
            f"{path} rotates {counted(layer.rotary_dim, 'channel')}, but the table {table.cache.shape[1]}. Build the "
            f"table from the "
            "frequencies of this model."
        )
    device = layer.cos_sin_cache.device
    if table.sections is None or type(layer).__name__ != ENGINE:
        halves = bool(getattr(layer, "is_neox_style", True))
        return TableRotary(table, layer.head_size, "half" if halves else "interleaved").to(device)
    layer.cos_sin_cache = table.cache.to(device, layer.cos_sin_cache.dtype)
    layer.mrope_section, layer.mrope_interleaved = list(table.sections), table.interleaved
    if hasattr(layer, "mrope_interleaved_glm"):  # SGLang caches the axis map of its sections
        layer.mrope_interleaved_glm, layer.axis_map = False, table.axis_of_pair.to(device)
    return layer
