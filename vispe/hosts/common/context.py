"""Context passed through the blocks of a converted model, and the state stored on the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
import torch.fx
from torch import Tensor, nn

from vispe.attention.automatic_backend import MIN_LOWRANK_KEYS
from vispe.attention.backend_selection import selected
from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.cache.masks import is_open
from vispe.attention.bias.windows import WindowMask
from vispe.attention.precision import compute_dtype, exporting, forward_mode
from vispe.encodings.base import Biased, Encoding, Mixing, Rotary
from vispe.encodings.compose import bias_of, value_term_of
from vispe.grid import Positions
from vispe.hosts.common import fx_leaves
from vispe.hosts.common.fx_leaves import Scores
from vispe.hosts.common.position_cache import PositionCache, positions_on
from vispe.utils.offloading import loaded


class Context:
    """State of one forward pass: positions, shared encodings, the user's mask, the model's own rotary embedding.

    It is passed through the blocks as their `attn_mask`, the only explicit argument that every block has, so that
    recomputation under activation checkpointing uses the same positions as the first pass. It is a plain object,
    because sharded training casts tensors inside tuples and dataclasses, and it is immutable by convention. The backend
    selected by `vispe.use_backend` at construction applies to all layers.

    While torch.fx traces a model, positions, mask and tokens are proxies; operations on them are in
    `vispe.hosts.common.fx_leaves`, and the backend is selected when the graph runs.

    Args:
        positions: prepared positions of the tokens.
        encodings: encodings shared by all blocks.
        mask: the user's attention mask; None without a mask.
        is_causal: whether the attention is causal.
        rope: the model's own rotary embedding; None if it is not in use.
        mixed: whether the samples of the batch have different grids.
    """

    __slots__ = ("encodings", "is_causal", "mask", "mixed", "patches", "positions", "rope", "selected")

    def __init__(
        self,
        positions: Positions,
        encodings: Sequence[Encoding],
        mask: Tensor | WindowMask | None,
        is_causal: bool,
        rope: Any = None,
        mixed: bool = False,
    ) -> None:
        self.positions, self.encodings, self.mask = positions, tuple(encodings), mask
        self.is_causal, self.rope, self.mixed = is_causal, rope, mixed
        self.selected = selected()
        self.patches: Context | None = None  # context of blocks that exclude prefix tokens

    def with_patches(self, prefix: int) -> Context:
        """Return this context, whose `patches` is a context without the first `prefix` tokens."""
        mask = fx_leaves.patches_mask(self.mask, prefix)
        pos = fx_leaves.patches(self.positions, prefix)
        context = Context(self.positions, self.encodings, self.mask, self.is_causal, self.rope, self.mixed)
        context.patches = Context(pos, self.encodings, mask, self.is_causal, self.rope, self.mixed)
        context.selected = context.patches.selected = self.selected
        return context

    def masked(self, mask: Tensor | None, is_causal: bool = False) -> Context:
        """Return this context with another user mask, for one layer."""
        other = Context(self.positions, self.encodings, mask, is_causal, self.rope, self.mixed)
        other.selected = self.selected
        return other

    def mix(self, x: Tensor, layer: int) -> Tensor:
        """Return the output (b, n, d) of block `layer` after the mixing encodings that are active there."""
        for encoding in self.encodings:
            if isinstance(encoding, Mixing) and encoding.active(layer):
                x = fx_leaves.mix(encoding, x, self._positions(x), layer)
        return x

    def idle(self, module: nn.Module) -> bool:
        """Return whether no encoding acts inside the attention layer `module`, so that stock attention can run."""
        if module.pos_enc is not None:
            return False
        return not any(isinstance(e, Biased | Rotary) for e in self.encodings)

    def plain_mask(self, module: nn.Module, x: Tensor) -> Tensor | None:
        """Return a dense mask equal to all encodings of a layer, for stock attention; None if there is no such mask.

        Only a fixed bias on a grid of fewer than `LONG` tokens has such a mask; for these, a dense mask is
        the fastest backend anyway. Stock attention avoids backend dispatch in Python: 0.4 ms per layer, 7 %
        of a ViT-S forward pass of one image.

        Args:
            module: the layer; its `vispe_layer`, `pos_enc` and `fused_attn` are read.
            x: its input (b, n, d).
        """
        if isinstance(x, torch.fx.Proxy):
            return None
        bias_only = module.pos_enc is None and self.mask is None and not self.is_causal and module.fused_attn
        if (
            not bias_only
            or self.positions.tokens >= MIN_LOWRANK_KEYS
            or torch.compiler.is_compiling()
            or forward_mode()
        ):
            return None
        # rotations and several softmaxes cannot be written as one mask
        if any(
            isinstance(e, Rotary) or e.multi_softmax for e in self.encodings
        ) or self.selected.backend not in (
            "auto",
            "sdpa",
        ):
            return None
        layer, pos = module.vispe_layer, self._positions(x)
        with loaded(self.encodings):
            bias = bias_of(self.encodings, pos, layer, x)
            if not is_cached_mask(bias) or value_term_of(self.encodings, pos, layer) is not None:
                return None
            dtype = compute_dtype(x)
            return bias.mask(dtype) if bias.finite or is_open(bias, dtype) else None

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, x: Tensor, dropout_p: float
    ) -> Tensor:
        """Return the attention output (b, h, n, d_h) of the converted attention layer `module`.

        Without fused attention, the weights pass through the layer's `attn_drop`, if it has one.

        Args:
            module: the layer; its `vispe_layer`, `pos_enc` and `fused_attn` are read.
            q: queries (b, h, n, d_h) after qk-norm.
            k: keys (b, h, n, d_h).
            v: values (b, h, n, d_v).
            x: input of the layer (b, n, d).
            dropout_p: dropout probability of the attention weights.

        Raises:
            ShapeError: samples of different grids are mixed, and the bias is a table that belongs to one grid.
        """
        drop = getattr(module, "attn_drop", None)
        # without fused attention, hooks on the dropout can read and change the weights
        if not module.fused_attn and drop is not None:
            scores = self.scores(module, (q,), (k,), v, x)
            (out,) = scores.weigh(drop(scores.softmax()))
            return out
        chosen = "auto" if isinstance(q, torch.fx.Proxy) else self.selected
        where = (self._encodings(module), self._positions(x), module.vispe_layer, x, self.mixed)
        masks = {"attn_mask": self._mask(x), "is_causal": self.is_causal}
        backend = chosen if module.fused_attn else "reference"
        out = fx_leaves.attend(q, k, v, *where, **masks, dropout_p=dropout_p, backend=backend)
        # kernels differ in the strides of their output; an exported graph must not depend on them
        return out.clone(memory_format=torch.contiguous_format) if exporting() else out

    def scores(
        self, module: nn.Module, queries: Sequence[Tensor], keys: Sequence[Tensor], v: Tensor, x: Tensor
    ) -> Scores:
        """Return the attention of a layer in two steps, for layers that apply a module to the weights.

        Args:
            module: the layer; its `vispe_layer` and `pos_enc` are read.
            queries: one tensor (b, h, n, d_h), or several: one for each attention map of a head (differential
                attention).
            keys: as many tensors as `queries`, of the same shape.
            v: values (b, h, n, d_v).
            x: input of the layer (b, n, d).

        Raises:
            ShapeError: samples of different grids are mixed, and the bias is a table that belongs to one grid.
        """
        where = (self._encodings(module), self._positions(x), module.vispe_layer, x, self.mixed)
        mask = self._mask(x)
        mask = mask.added() if isinstance(mask, WindowMask) else mask
        return fx_leaves.scores(queries, keys, v, *where, attn_mask=mask, is_causal=self.is_causal)

    def _positions(self, x: Tensor) -> Positions:
        """Return the positions on the device of the tokens, which differs between blocks on several devices."""
        return self.positions if isinstance(x, torch.fx.Proxy) else positions_on(self.positions, x.device)

    def _mask(self, x: Tensor) -> Tensor | WindowMask | None:
        moves = isinstance(self.mask, Tensor) and not isinstance(x, torch.fx.Proxy)
        return self.mask.to(x.device) if moves else self.mask

    def _encodings(self, module: nn.Module) -> tuple[Encoding, ...]:
        of_layer = module.pos_enc
        return self.encodings if of_layer is None else (*self.encodings, *of_layer.parts())


def is_cached_mask(bias: Bias | None) -> TypeGuard[Bias]:
    """Return whether a bias can be a cached dense mask that is added to the scores of all samples."""
    # a bias without a cache key would be computed in every call
    return not (bias is None or bias.key is None or bias.replaces_product or bias.per_sample)


@dataclass(eq=False)
class HostState:
    """State of a converted model in addition to its modules; copied and pickled with the model.

    Attributes:
        spec: terms of the encoding, JSON-able.
        stock: the original class of the model.
        reference: grid of the training resolution.
        table: the detached absolute table, in the form of the model's family; None if the model had none.
        lost: names of stock position information that does not exist, because the model was built with the
            encoding.
        keep_abs: whether the absolute table is in use.
        keep_rope: whether the model's own rotary embedding is in use.
        rope: the detached rotary embedding, with the dtype of the model at that time; None if the model had
            none.
        inside: whether the encoding acts inside attention, so that attention layers are swapped.
        layered: whether layers have separate encodings with their own parameters.
        args: the original `pos_embed` in timm's record of constructor arguments, if any.
        resolved: the spec for building an equal model, with the training grid for encodings that use it.
        cache: positions of recent grids.
        fixed: paths of parameters of the encodings that are saved but never trained, for hosts that freeze groups.
        layer_grids: by path, the grid of the training resolution of layers that have their own.
    """

    spec: list[dict[str, Any]]
    stock: type[nn.Module]
    reference: tuple[int, ...]
    table: Any
    lost: tuple[str, ...]
    keep_abs: bool
    inside: bool
    layered: bool
    args: Any = None
    resolved: list[dict[str, Any]] = field(default_factory=list)
    keep_rope: bool = False
    rope: tuple[nn.Module, torch.dtype] | None = None
    cache: PositionCache = field(default_factory=PositionCache)
    fixed: tuple[str, ...] = ()
    layer_grids: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def saved(self) -> list[dict[str, Any]]:
        """The `pos_embed` from which an equal model is built, JSON-able."""
        keywords = (("learn", self.keep_abs), ("rope", self.keep_rope))
        return [*({"name": keyword} for keyword, in_use in keywords if in_use), *(self.resolved or self.spec)]
