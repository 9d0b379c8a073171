"""Overlapping patches: spacing of their tokens, and the model's own absolute table at their positions."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import torch.fx
from torch import Tensor, nn

from vispe.encodings import attention_layer
from vispe.encodings.base import Additive, Biased, Encoding, Mixing, Rotary
from vispe.errors import VispeError
from vispe.grid import Grid

_PROBE = (3, 4)  # grid on which encodings are tested for a dependence on spacing


def spacing_of(projection: object) -> tuple[float, float] | None:
    """Return the distance of tokens along (rows, columns), in patch sizes; None if patches do not overlap.

    Args:
        projection: the patch embedding; None is returned if it is not a convolution.

    >>> spacing_of(nn.Conv2d(3, 8, 14, stride=7)), spacing_of(nn.Conv2d(3, 8, 14, stride=14))
    ((0.5, 0.5), None)
    """
    if not isinstance(projection, nn.Conv2d):
        return None
    kernel, stride = projection.kernel_size, projection.stride
    if kernel == stride or any(k % s for k, s in zip(kernel, stride, strict=True)):
        return None
    return stride[0] / kernel[0], stride[1] / kernel[1]


@torch.fx.wrap
def table_at(
    table: Tensor, old: Sequence[int], shape: Sequence[int], spacing: tuple[float, float], prefix: int
) -> Tensor:
    """Return an absolute table resampled at the true positions of overlapping patches, (1, prefix + n, d).

    The table is aligned with the image as for patches without overlap and interpolated with the same kernel (bicubic,
    antialiased where the table is finer than the grid of patches): a token at the position of an entry gets that entry.

    Args:
        table: (1, prefix + h * w, d).
        old: its grid, (h, w).
        shape: the grid of overlapping patches.
        spacing: their distance in patch sizes.
        prefix: number of entries at the front that are copied unchanged.

    >>> table = torch.arange(3.0).view(1, 3, 1).expand(1, 3, 1)
    >>> table_at(table, (1, 3), (1, 5), (0.5, 0.5), 0)[0, ::2, 0]
    tensor([0., 1., 2.])
    """
    first, entries = table[:, :prefix], table[0, prefix:]
    entries = entries.float().unflatten(0, tuple(old))
    rows, columns = (_weights(old[axis], shape[axis], spacing[axis], table.device) for axis in range(2))
    # separable interpolation: (h, w, d) -> (rows, columns, d)
    resampled = torch.einsum("ri,ijd,cj->rcd", rows, entries, columns)
    return torch.cat([first, resampled.flatten(0, 1)[None].to(table.dtype)], 1)


def _weights(entries: int, tokens: int, spacing: float, device: torch.device) -> Tensor:
    """Return the interpolation weight of each entry of an axis for each token, (tokens, entries) float32."""
    # the table covers the extent of the image, which is (tokens - 1) * spacing + 1 patches
    scale = entries / ((tokens - 1) * spacing + 1)
    centre = scale * (torch.arange(tokens, dtype=torch.float64, device=device) * spacing + 0.5)[:, None]
    position = torch.arange(entries, dtype=torch.float64, device=device) + 0.5
    # a table finer than the grid is averaged, as torch does with antialias=True
    width = max(scale, 1.0)
    x = ((position - centre) / width).abs()
    # cubic convolution kernel with a = -0.5, on [0, 1) and [1, 2)
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    weight = torch.where(x < 1, near, torch.where(x < 2, far, torch.zeros_like(x)))
    return (weight / weight.sum(1, keepdim=True)).float()


def without_distances(
    encodings: Sequence[Encoding], dim: int, num_heads: int, head_dim: int, depth: int
) -> list[str]:
    """Return the names of encodings whose output does not depend on the spacing of tokens.

    Each is evaluated, with random parameters, on one grid with two spacings. An encoding is returned if its
    output is unchanged, or if it needs more than positions; such an encoding would treat overlapping patches
    as if they did not overlap.

    Args:
        encodings: encodings of a model.
        dim: width of the model's tokens.
        num_heads: number of heads.
        head_dim: width of a head.
        depth: number of blocks.
    """
    names: list[str] = []
    for encoding in encodings:
        # `none`, and vectors computed from the token itself, are skipped
        absolute = isinstance(encoding, Additive) and not encoding.reads_tokens
        if not absolute and not isinstance(encoding, Rotary | Biased | Mixing):
            continue
        clone = copy.deepcopy(encoding).to("cpu", torch.float32).eval()
        random = torch.Generator().manual_seed(0)
        with torch.no_grad():
            # parameters that are initialised to zero would have no effect
            for p in clone.parameters():
                p.copy_(torch.randn(p.shape, generator=random) * 0.5)
            n = _PROBE[0] * _PROBE[1]
            x = torch.randn(1, n, dim, generator=random)
            q, k, v = torch.randn(3, 1, num_heads, n, head_dim, generator=random).unbind(0)
            try:
                far, near = (
                    _outputs(clone, (q, k, v), x, spacing, depth) for spacing in ((1.0, 1.0), (0.5, 0.25))
                )
            except VispeError:
                names.append(encoding.name)
                continue
        if all(torch.equal(a, b) for a, b in zip(far, near, strict=True)):
            names.append(encoding.name)
    return list(dict.fromkeys(names))


def _outputs(
    encoding: Encoding,
    heads: tuple[Tensor, Tensor, Tensor],
    x: Tensor,
    spacing: tuple[float, float],
    depth: int,
) -> list[Tensor]:
    """Return all outputs of an encoding for tokens of a small grid: its table, mixed tokens or attention."""
    pos = encoding.prepare(Grid(_PROBE, spacing=spacing, reference=_PROBE).positions())
    if isinstance(encoding, Additive):
        return [encoding.table(pos)]
    if isinstance(encoding, Mixing):
        return [encoding.mix(x, pos, layer) for layer in range(depth) if encoding.active(layer)]
    return [attention_layer.attend(*heads, (encoding,), pos, layer, x) for layer in range(depth)]
