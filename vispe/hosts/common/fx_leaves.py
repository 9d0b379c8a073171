"""torch.fx leaf functions: each is one node in the traced graph of a converted model.

torch.fx records tensors and plain numbers. It cannot trace `Positions`, or control flow that depends on
values, as in encodings. So a traced graph calls these functions at run time, with the sizes of its input and
the encodings as submodules. Call the functions as attributes of this module (``fx_leaves.attend``), because
torch.fx looks them up there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn

from vispe.attention.backends import reference
from vispe.attention.bias.table import has_grid_table
from vispe.attention.call import Call
from vispe.encodings import attention_layer
from vispe.encodings.base import Additive, Encoding, Mixing
from vispe.encodings.compose import bias_of, multi_softmax_of
from vispe.encodings.multi_softmax import calls_of, weights_of
from vispe.encodings.parts.preparation import prepare
from vispe.errors import ShapeError, counted
from vispe.grid import Grid, Positions
from vispe.hosts.common.position_cache import PositionCache
from vispe.utils.offloading import loaded


class Scores:
    """Attention in two steps: `softmax` returns the weights, and `weigh` the weighted sum of the values.

    Args:
        calls: the softmaxes of each attention map of a head, with their gates (see `calls_of`).
        encodings: the encodings of the layer, whose weights are read.
    """

    def __init__(
        self, calls: Sequence[Sequence[tuple[Tensor | None, Call]]], encodings: Sequence[Encoding]
    ) -> None:
        self.calls, self.encodings = tuple(calls), encodings

    def softmax(self) -> Tensor:
        """Return the weights (b, h, n, n) in float32 or float64; the maps of a head are adjacent in axis 1."""
        with loaded(self.encodings):
            maps = [weights_of(softmaxes) for softmaxes in self.calls]
        return maps[0] if len(maps) == 1 else torch.stack(maps, 2).flatten(1, 2)

    def weigh(self, weights: Tensor) -> list[Tensor]:
        """Return the output (b, h, n, d_v) of each map of a head."""
        maps = weights.unflatten(1, (-1, len(self.calls))).unbind(2)
        # the softmaxes of a map share their values, so those of the first call are used
        with loaded(self.encodings):
            return [reference.weighted(calls[0][1], one) for calls, one in zip(self.calls, maps, strict=True)]


def one_size(image: Tensor) -> Tensor:
    """Return images or feature maps (b, ...) unchanged; in a `torch.jit.trace`, add a step that rejects other sizes.

    Such a trace contains the positions of one grid, which would be wrong for another grid with the same
    number of patches.
    """
    if not torch.jit.is_tracing():
        return image
    return image.expand(-1, *(int(n) for n in image.shape[1:]))


@torch.fx.wrap
def positions(
    image: Tensor,
    tokens: int,
    shape: tuple[int, int],
    prefix: int,
    reference: tuple[int, ...],
    encodings: Sequence[Encoding],
    cache: PositionCache | None,
    embed: nn.Module | None,
    spacing: tuple[float, float] | None = None,
) -> Positions:
    """Return the prepared positions of one forward pass.

    Args:
        image: images (b, c, height, width).
        tokens: number of patch tokens.
        shape: their grid.
        prefix: number of tokens without a position.
        reference: grid of the training resolution.
        encodings: all encodings that prepare positions.
        cache: cache of positions; None in a traced graph, which does not cache.
        embed: the patch embedding, if it accepts images with another grid than the model's; otherwise None.
        spacing: distance of tokens in patch sizes, where patches overlap.

    Raises:
        ShapeError: the grid does not match the image.
    """
    grid = Grid(shape, prefix=prefix, reference=reference, spacing=spacing)
    size = tuple(image.shape[-2:])
    advice = "Build the model with dynamic_img_size=True or call set_input_size."
    if tokens != grid.patches:
        raise ShapeError(
            f"The patch embedding must return tokens of the grid {grid.shape}, got {counted(tokens, 'token')} for an "
            f"image of {size} pixels. {advice}"
        )
    patches = grid.shape if embed is None else tuple(embed.dynamic_feat_size(size))
    if patches != grid.shape:
        raise ShapeError(
            f"The image must have the patches of the grid {grid.shape}, got {counted(patches, 'patch')} for {size} "
            f"pixels. {advice}"
        )
    pos = (cache or PositionCache())(grid, image)
    return prepare(encodings, pos, batch=image.shape[0])


@torch.fx.wrap
def layer_positions(
    x: Tensor, shape: tuple[int, ...], prefix: int, reference: tuple[int, ...], encodings: Sequence[Encoding]
) -> Positions:
    """Return the prepared positions of tokens (b, n, d) on a grid of `shape`, for a layer with its own grid."""
    grid = Grid(tuple(int(n) for n in shape), prefix=prefix, reference=reference)
    return prepare(encodings, PositionCache()(grid, x), batch=x.shape[0])


@torch.fx.wrap
def gather(pos: Positions, keep: Tensor) -> Positions:
    """Return the positions of the patches with indices `keep` (b, m), behind all prefix tokens."""
    prefix = pos.grid.prefix if pos.grid else pos.tokens - int(pos.spatial[0].sum())
    first = torch.arange(prefix, device=keep.device).expand(keep.shape[0], -1)
    return pos.gather(torch.cat([first, keep + prefix], 1))


@torch.fx.wrap
def patches(pos: Positions, prefix: int) -> Positions:
    """Return the positions without the first `prefix` tokens."""
    if pos.grid is None:
        raise ShapeError(f"Late prefix tokens need positions on a grid, got {pos}.")
    indices = torch.arange(prefix, pos.tokens, device=pos.coords.device)
    remaining = pos.gather(indices.expand(pos.coords.shape[0], -1)).replace(grid=replace(pos.grid, prefix=0))
    remaining.on_grid = pos.on_grid
    return remaining


@torch.fx.wrap
def patches_mask(mask: Tensor | None, prefix: int) -> Tensor | None:
    """Return a mask (..., n or 1, n) without the rows and columns of the first `prefix` tokens."""
    if mask is None:
        return None
    rows = mask if mask.shape[-2] == 1 else mask[..., prefix:, :]
    return rows[..., prefix:]


@torch.fx.wrap
def add(encoding: Additive, x: Tensor, pos: Positions, image: Tensor | None) -> Tensor:
    """Return the tokens (b, n, d) with an additive encoding."""
    with loaded((encoding,)):
        return encoding.embed(x, pos, image)


@torch.fx.wrap
def mix(encoding: Mixing, x: Tensor, pos: Positions, layer: int) -> Tensor:
    """Return the tokens (b, n, d) after a mixing encoding of block `layer`."""
    with loaded((encoding,)):
        return encoding.mix(x, pos, layer)


@torch.fx.wrap
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    encodings: Sequence[Encoding],
    pos: Positions,
    layer: int,
    x: Tensor,
    mixed: bool,
    **arguments: Any,
) -> Tensor:
    """Return attention (b, h, n, d_v) with all `encodings` of block `layer`.

    Raises:
        ShapeError: samples of different grids are `mixed`, and the bias is a table that belongs to one grid.
    """
    if mixed:
        _check_mixed(encodings, pos, layer, x)
    return attention_layer.attend(q, k, v, encodings, pos, layer, x, **arguments)


@torch.fx.wrap
def scores(
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    v: Tensor,
    encodings: Sequence[Encoding],
    pos: Positions,
    layer: int,
    x: Tensor,
    mixed: bool,
    **masks: Any,
) -> Scores:
    """Return attention in two steps, for layers that apply a module to the weights; see `Context.scores`."""
    if mixed:
        _check_mixed(encodings, pos, layer, x)
    where = (encodings, pos, layer, x)
    with loaded(encodings):
        calls = [calls_of(q, k, v, *where, **masks) for q, k in zip(queries, keys, strict=True)]
    return Scores(calls, encodings)


def _check_mixed(encodings: Sequence[Encoding], pos: Positions, layer: int, x: Tensor) -> None:
    with loaded(encodings):
        has_table = multi_softmax_of(encodings) is not None or has_grid_table(
            bias_of(encodings, pos, layer, x)
        )
    if has_table:
        names = " + ".join(e.name for e in encodings)
        raise ShapeError(
            f"The batch packs samples of different grids, but the table of {names} is computed for one grid at a time; "
            "pack samples of equal grids, or use another encoding."
        )


NODES: tuple[Callable[..., Any], ...] = (
    positions,
    layer_positions,
    gather,
    patches,
    patches_mask,
    add,
    mix,
    attend,
    scores,
)
