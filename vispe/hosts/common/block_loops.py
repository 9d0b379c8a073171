"""Positions for user code that calls the blocks of a converted model: masked autoencoders, token merging, prompts.

The forward pass of a converted model passes positions through the blocks to the attention layers. A user's
loop over the blocks passes no positions, so the layers raise an error instead of computing attention without
the encoding. `positions_for` supplies positions, either to all layers inside a ``with`` statement or as an
argument of each block.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar, Token
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn

from vispe.attention.bias.windows import WindowMask
from vispe.encodings.base import Encoding, Mixing
from vispe.encodings.parts.preparation import prepare
from vispe.errors import InputError, ShapeError, UnsupportedCombination, UnsupportedHost, counted
from vispe.grid import Grid, Positions
from vispe.hosts.common import fx_leaves
from vispe.hosts.common.context import Context, HostState
from vispe.utils.parameters import parameters_of

# innermost last; a context variable, so threads and generators do not see each other's positions
_ACTIVE: ContextVar[tuple[LoopPositions, ...]] = ContextVar("vispe_positions", default=())


class LoopPositions(Context):
    """Positions of the tokens of one forward pass, returned by `positions_for`.

    Use it in a ``with`` statement, or pass it to the blocks as their mask. Only passing it as mask works for
    blocks that
    activation checkpointing recomputes in the backward pass, and for graphs compiled with ``fullgraph=True``.
    """

    __slots__ = ("_layers", "_tokens")

    def __init__(
        self, positions: Positions, encodings: Sequence[Encoding], rope: Any, layers: Sequence[nn.Module]
    ) -> None:
        super().__init__(positions, encodings, None, False, rope)
        self._layers = {id(layer): layer for layer in layers}
        self._tokens: list[Token[tuple[LoopPositions, ...]]] = []

    def __enter__(self) -> LoopPositions:
        self._tokens.append(_ACTIVE.set((*_ACTIVE.get(), self)))
        return self

    def __exit__(self, *error: object) -> None:
        _ACTIVE.reset(self._tokens.pop())

    def holds(self, layer: nn.Module) -> bool:
        """Return whether an attention layer belongs to the model of these positions."""
        return id(layer) in self._layers

    def check(self, x: Tensor) -> None:
        """Raise `ShapeError` unless there is one position for each token of x (b, n, d)."""
        if isinstance(x, torch.fx.Proxy):
            raise UnsupportedCombination(
                "vispe.positions_for: torch.fx cannot trace a loop over the blocks. Trace the converted model itself."
            )
        pos = self.positions
        if pos.tokens != x.shape[1] or pos.coords.shape[0] not in (1, x.shape[0]):
            prefix = pos.grid.prefix if pos.grid else 0
            raise ShapeError(
                f"vispe.positions_for: the positions are those of {pos.coords.shape[0]} x {pos.tokens} tokens "
                f"({counted(prefix, 'prefix token')} and {counted(pos.tokens - prefix, 'patch')}), got tokens "
                f"{tuple(x.shape)}. Pass the patches that remain as index=, and the number of class, register and "
                "prompt tokens as prefix=."
            )


def positions_for(
    model: nn.Module, grid: Sequence[int], index: Tensor | None = None, prefix: int | None = None
) -> LoopPositions:
    """Return the positions of tokens for blocks that are called one by one.

    Within ``with vispe.positions_for(...):`` the attention layers of the model use these positions. The
    returned value can also be passed to a block in place of its attention mask. This is required for
    checkpointed blocks, since the ``with`` statement may have ended when they are recomputed, and for graphs
    compiled with ``fullgraph=True``. Random numbers of encodings in training mode are drawn by this call, so
    call it once for all blocks that process the same tokens.

    Additive encodings are added by the model's own token embedding (timm: ``_pos_embed``, open_clip: ``_embeds``), not
    by the blocks.

    Args:
        model: a converted ViT, Eva or NaFlexVit of timm, an image tower of open_clip, or a vision model of
            transformers; wrappers and models that contain one such model are accepted.
        grid: rows and columns of all patches, (h, w); frames, rows and columns for video models.
        index: int64 (b, m), or (m,) for all samples: indices of the remaining patches, row-major from 0, in the order
            of the tokens. Default: all patches in order.
        prefix: number of tokens without a position in front of the patches, prompts included. Default: the class and
            register tokens of the model.

    Example:
        >>> import timm, torch
        >>> vit = timm.create_model('vit_tiny_patch16_224', img_size=32, depth=2, pos_embed='alibi2d').eval()
        >>> image = torch.rand(1, 3, 32, 32)
        >>> x = vit._pos_embed(vit.patch_embed(image))
        >>> with positions_for(vit, (2, 2)):
        ...     x = vit.norm(vit.blocks(x))
        >>> torch.equal(x, vit.forward_features(image))
        True

    Raises:
        UnsupportedHost: the model is not converted, or its blocks do not support positions from the caller.
        UnsupportedCombination: an encoding acts between blocks, or prefix tokens enter late.
        ShapeError: `grid` has the wrong number of axes, or `index` is not a valid index into the grid.
    """
    inner = _converted(model)
    encodings = inner._vispe_all()
    for e in encodings:
        if isinstance(e, Mixing):
            raise UnsupportedCombination(
                f"vispe.positions_for: {e.name} mixes tokens between blocks, which only the forward pass of the model "
                "does. Call the model, forward_features or forward_intermediates."
            )
        if e.prefix_from:
            raise UnsupportedCombination(
                f"vispe.positions_for: {e.name} excludes prefix tokens before block {e.prefix_from}, which only the "
                "forward pass of the model does. Convert with late_prefix=false."
            )
    reference = inner.vispe.reference
    if reference is not None and len(grid) != len(reference):
        raise ShapeError(
            f"vispe.positions_for: the patches of {inner.vispe.stock.__name__} form a {len(reference)}-axis grid, got "
            f"grid={tuple(grid)}. Give one number per axis."
        )
    patches: Grid = inner._vispe_loop_grid(tuple(grid), prefix)
    like = parameters_of(inner)[0]
    keep = None if index is None else _checked(index, patches).to(like.device)
    pos = inner.vispe.cache(patches, like)
    # random draws differ between samples only where the samples keep different patches
    pos = prepare(encodings, pos, batch=None if keep is None or keep.shape[0] == 1 else keep.shape[0])
    if keep is not None:
        if pos.coords.shape[0] > 1 and keep.shape[0] == 1:
            keep = keep.expand(pos.coords.shape[0], -1)
        pos = fx_leaves.gather(pos, keep)
    layers = [layer for _, _, layer in inner.vispe_attentions()]
    return LoopPositions(pos, inner._vispe_shared(), inner.vispe.keep_rope, layers)


def context_for(layer: Any, x: Tensor, mask: Any, calls: str, is_causal: bool = False) -> Context:
    """Return the context of an attention layer: its argument, or the positions of the ``with`` statement around it.

    Args:
        layer: the attention layer.
        x: its input (b, n, d).
        mask: its mask argument: a context, a mask or None.
        calls: the names of the calls that supply positions, for the message.
        is_causal: whether the caller requests causal attention.

    Raises:
        InputError: there are no positions.
        ShapeError: the number of positions differs from that of the tokens.
    """
    if not isinstance(mask, Context):
        return _from_loop(layer, x, mask, calls, is_causal)
    if isinstance(mask, LoopPositions):
        mask.check(x)
    return mask


# a compiled graph would keep the positions of its first call
@torch.compiler.disable(reason="Pass the value of vispe.positions_for to the block in place of the mask.")
def _from_loop(layer: Any, x: Tensor, mask: Any, calls: str, is_causal: bool) -> Context:
    """Return the positions of the ``with`` statement around a call of an attention layer, or raise `InputError`."""
    active = next((p for p in reversed(_ACTIVE.get()) if p.holds(layer)), None)
    # without an encoding (`none`) the layer needs no positions; the value is whether the model's own rotation is used
    bare = getattr(layer, "vispe_no_encoding", None)
    if bare is not None and active is None:
        return Context(Grid((1,)).positions(), (), mask, is_causal, bare)
    block = f"Attention of block {layer.vispe_layer}"
    if torch._C._current_graph_task_id() != -1:  # that pass may have had other positions
        raise InputError(
            f"{block}: recomputed in the backward pass, where vispe.positions_for is not read. Pass its value to the "
            "block in place of the mask, as in `checkpoint(block, x, positions)`."
        )
    if active is None:
        shown = "none" if mask is None else f"a mask of {type(mask).__name__}"
        raise InputError(
            f"{block}: its encoding needs positions, got {shown}. Call {calls}; in a loop over the blocks, use "
            "`with vispe.positions_for(model, grid):`."
        )
    active.check(x)
    return active if mask is None and not is_causal else active.masked(mask, is_causal)


def mask_of_torch(mask: Tensor | None, heads: int) -> Tensor | None:
    """Return a mask of `torch.nn.MultiheadAttention`, (n, n) or (b h, n, n), as an attention mask.

    Boolean masks are inverted: in torch's module True excludes a key, in attention functions True includes a
    key.
    """
    if mask is None or isinstance(mask, WindowMask):
        return mask
    mask = ~mask if mask.dtype == torch.bool else mask
    return mask.unflatten(0, (-1, heads)) if mask.ndim == 3 else mask


def _converted(model: nn.Module) -> Any:
    """Return the converted model in a module."""
    parts = [m for m in model.modules() if isinstance(getattr(m, "vispe", None), HostState)]
    if len(parts) != 1:
        advice = "Convert it first; vispe.convert(model, 'learn') keeps its own absolute table"
        raise UnsupportedHost(
            f"vispe.positions_for: {type(model).__name__} contains {counted(len(parts), 'model')} converted by "
            f"vispe, and one is needed. {'Pass the one whose blocks you call' if parts else advice}."
        )
    return parts[0]


def _checked(index: Tensor, grid: Grid) -> Tensor:
    """Return indices of patches as (b or 1, m)."""
    if not isinstance(index, Tensor) or index.dtype != torch.int64 or index.ndim not in (1, 2):
        got = (
            f"{tuple(index.shape)} {index.dtype}"
            if isinstance(index, Tensor)
            else f"a {type(index).__name__}"
        )
        raise ShapeError(
            f"vispe.positions_for: index must be an int64 tensor of shape (b, m) or (m,), got {got}. Number the "
            "patches row by row from 0."
        )
    # values on an accelerator are not checked, as reading them would synchronise the device
    if (
        index.device.type == "cpu"
        and index.numel()
        and not 0 <= int(index.min()) <= int(index.max()) < grid.patches
    ):
        raise ShapeError(
            f"vispe.positions_for: index must be within 0 to {grid.patches - 1} on the grid {grid.shape}, got "
            f"{int(index.min())} to {int(index.max())}. Do not count prefix tokens."
        )
    return index[None] if index.ndim == 1 else index
