"""What travels through the blocks of a converted model, and what a converted model remembers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn

from vispe.attention.backend_selection import selected
from vispe.attention.bias.windows import WindowMask
from vispe.attention.dispatch import LONG
from vispe.attention.precision import compute_dtype, exporting
from vispe.encodings.base import Biased, Encoding, Mixing, Rotary
from vispe.encodings.compose import bias_of, value_term_of
from vispe.grid import Positions
from vispe.hosts.common import fx_leaves
from vispe.hosts.common.fx_leaves import Scores
from vispe.hosts.common.position_cache import PositionCache


class Context:
    """One forward pass, as its layers see it: positions, shared encodings, the user's mask, the model's own rope.

    It is handed through the blocks as their `attn_mask`, the only explicit channel that every block has; so
    recomputation under checkpointing sees what the first pass saw. It is a plain object, because sharded
    training casts the tensors that it finds in tuples and dataclasses, and it is never changed. The backend that
    `vispe.use_backend` named when it was made stays that of its layers.

    While torch.fx traces a model, positions, mask and tokens are proxies; what is computed with them is in
    `vispe.hosts.common.fx_leaves`, and a backend is chosen when the graph runs.
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
        self.patches: Context | None = None  # for blocks that prefix tokens do not enter

    def with_patches(self, prefix: int) -> Context:
        """Return the same context with one for the patches alone in `patches`."""
        mask = fx_leaves.patches_mask(self._added(), prefix)
        pos = fx_leaves.patches(self.positions, prefix)
        whole = Context(self.positions, self.encodings, self.mask, self.is_causal, self.rope, self.mixed)
        whole.patches = Context(pos, self.encodings, mask, self.is_causal, self.rope, self.mixed)
        whole.selected = whole.patches.selected = self.selected
        return whole

    def masked(self, mask: Tensor | None, is_causal: bool = False) -> Context:
        """Return the same context with another mask of the user, for one layer."""
        other = Context(self.positions, self.encodings, mask, is_causal, self.rope, self.mixed)
        other.selected = self.selected
        return other

    def mix(self, x: Tensor, layer: int) -> Tensor:
        """Return the tokens (b, n, d) that left block `layer` after the encodings that mix there."""
        for encoding in self.encodings:
            if isinstance(encoding, Mixing) and encoding.active(layer):
                x = fx_leaves.mix(encoding, x, self.positions, layer)
        return x

    def idle(self, module: nn.Module) -> bool:
        """Return whether nothing acts inside the attention layer `module`, so that stock attention serves."""
        if module.pos_enc is not None:
            return False
        return not any(isinstance(e, Biased | Rotary) for e in self.encodings)

    def plain_mask(self, module: nn.Module, x: Tensor) -> Tensor | None:
        """Return one mask that says all of this layer's encodings, so that stock attention can run, or None.

        That is a fixed bias on a grid so small that nothing beats its mask. What it saves is Python: 0.4 ms a
        layer, seven hundredths of a ViT-S forward of one image.

        Args:
            module: the layer; its `vispe_layer`, `pos_enc` and `fused_attn` are read.
            x: its input (b, n, d).
        """
        if isinstance(x, torch.fx.Proxy):
            return None
        alone = module.pos_enc is None and self.mask is None and not self.is_causal and module.fused_attn
        if not alone or self.positions.tokens >= LONG or torch.compiler.is_compiling():
            return None
        if any(isinstance(e, Rotary) or e.branched for e in self.encodings) or self.selected.backend not in (
            "auto",
            "sdpa",
        ):
            return None
        layer = module.vispe_layer
        bias = bias_of(self.encodings, self.positions, layer, x)
        if bias is None or bias.key is None or bias.whole or not bias.finite or bias.per_sample:
            return None
        if value_term_of(self.encodings, self.positions, layer) is not None:
            return None
        return bias.mask(compute_dtype(x))

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, x: Tensor, dropout_p: float
    ) -> Tensor:
        """Return attention as the swapped attention layer `module` computes it.

        Where it is not fused, its weights pass through the layer's `attn_drop`, if it has one.

        Args:
            module: the layer; its `vispe_layer`, `pos_enc` and `fused_attn` are read.
            q: queries (b, h, n, d_h) after qk-norm.
            k: keys of the same shape.
            v: values.
            x: input of the layer (b, n, d).
            dropout_p: dropout of the attention weights.

        Raises:
            ShapeError: samples of different grids are mixed, and the bias is a table that belongs to one grid.
        """
        drop = getattr(module, "attn_drop", None)
        # without fused attention the weights are there to be seen and changed by hooks
        if not module.fused_attn and drop is not None:
            scores = self.scores(module, (q,), (k,), v, x)
            (out,) = scores.weigh(drop(scores.softmax()))
            return out
        chosen = "auto" if isinstance(q, torch.fx.Proxy) else self.selected
        where = (self._encodings(module), self.positions, module.vispe_layer, x, self.mixed)
        masks = {"attn_mask": self.mask, "is_causal": self.is_causal}
        backend = chosen if module.fused_attn else "reference"
        out = fx_leaves.attend(q, k, v, *where, **masks, dropout_p=dropout_p, backend=backend)
        # kernels differ in the strides of their output; an exported graph must not depend on them
        return out.clone(memory_format=torch.contiguous_format) if exporting() else out

    def scores(
        self, module: nn.Module, queries: Sequence[Tensor], keys: Sequence[Tensor], v: Tensor, x: Tensor
    ) -> Scores:
        """Return attention in two steps, for layers whose weights pass through a module of their own.

        Args:
            module: the layer; its `vispe_layer` and `pos_enc` are read.
            queries: one tensor (b, h, n, d_h), or one for each map that a head has.
            keys: as many, of the same shape.
            v: values (b, h, n, d_v).
            x: input of the layer (b, n, d).

        Raises:
            ShapeError: samples of different grids are mixed, and the bias is a table that belongs to one grid.
        """
        where = (self._encodings(module), self.positions, module.vispe_layer, x, self.mixed)
        return fx_leaves.scores(queries, keys, v, *where, attn_mask=self._added(), is_causal=self.is_causal)

    def _added(self) -> Tensor | None:
        return self.mask.added() if isinstance(self.mask, WindowMask) else self.mask

    def _encodings(self, module: nn.Module) -> tuple[Encoding, ...]:
        own = module.pos_enc
        return self.encodings if own is None else (*self.encodings, *own.parts())


def backend_in_words(fused: bool, off: str) -> str:
    """Return which backend swapped layers take, for `describe`.

    Args:
        fused: whether fused attention is on in all of them.
        off: why it is not, in words.
    """
    if not fused:
        return f"reference ({off})"
    backend, by = selected()
    return f"{backend} (chosen by {by})" if by else backend


@dataclass(eq=False)
class HostState:
    """What a converted model remembers beside its modules; it is copied and pickled with the model.

    Attributes:
        spec: the encoding, JSON-able.
        stock: the class that the model had.
        reference: grid of the training resolution.
        table: the absolute table that was taken out, as its family keeps it; None when there was none.
        lost: what the model was built without, because it was built with the encoding, and cannot bring back.
        keep_abs: whether the absolute table stays in use.
        keep_rope: whether the model's own rotary embedding stays in use.
        rope: the rotary embedding that was taken out, with the dtype that the model had; None when there was none.
        inside: whether the encoding works inside attention, so that attention layers are swapped.
        layered: whether layers have encodings with parameters of their own.
        args: what timm remembered as `pos_embed` before, if anything.
        resolved: the spec with the training grid where that counts, for a model that is built again.
        cache: positions of the last grids.
        fixed: paths of parameters of the encodings that are saved but never trained, for hosts that freeze groups.
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

    @property
    def saved(self) -> list[dict[str, Any]]:
        """What `pos_embed` must be to build such a model again, JSON-able."""
        kept = (("learn", self.keep_abs), ("rope", self.keep_rope))
        return [*({"name": word} for word, stays in kept if stays), *(self.resolved or self.spec)]
