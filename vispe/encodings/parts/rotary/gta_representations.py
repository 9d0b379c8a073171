"""Group representations of `gta`: the action of a geometric attribute on a group of channels (arXiv 2310.10375)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vispe.attention.precision import exact_product
from vispe.attention.transform.blocks import BlockTransform
from vispe.encodings.parts.rotary.cameras import inverse
from vispe.errors import OptionError, counted


class ChannelGroup(NamedTuple):
    """Group of channels of a head.

    Attributes:
        name: representation: triv, se3, so3, so2 or t2.
        size: number of channels.
        block: channels that one copy of the representation acts on.
    """

    name: str
    size: int
    block: int


def channel_groups(
    head: int, axes: int, se3: int, so3: int, so2: int | None, t2: int, so3_degree: int
) -> list[ChannelGroup]:
    """Return the non-empty groups of the channels of a head, in order.

    Args:
        head: channels of a head.
        axes: number of axes.
        se3: channels of the group; likewise `so3`, `so2` (None for all that remain) and `t2`.
        so3: see `se3`.
        so2: see `se3`.
        t2: see `se3`.
        so3_degree: degree of the representation of `so3`.

    Raises:
        OptionError: the groups do not fit.
    """
    pair_size = 2 * axes
    blocks = {"se3": 4, "so3": 3 if so3_degree == 1 else 8, "so2": pair_size, "t2": 3}
    # by default, so2 has all remaining channels that form complete sets of pairs
    rest = max(0, head - se3 - so3 - t2) // pair_size * pair_size
    sizes = {"se3": se3, "so3": so3, "so2": rest if so2 is None else so2, "t2": t2}
    for name in ("so3", "so2"):
        if sizes[name] % blocks[name]:
            raise OptionError(
                f"{name} needs a multiple of {counted(blocks[name], 'channel')}, got {name}={sizes[name]}."
            )
    used = sum(sizes.values())
    if not 0 < used <= head:
        raise OptionError(
            f"gta has {counted(head, 'channel')} per head, but its groups use {used} ({sizes}). Change "
            "their sizes."
        )
    if t2 and axes != 2:
        raise OptionError(
            f"t2 needs axes=2, for translations in the plane, got axes={axes}. Use axes=2 or omit t2."
        )
    # sizes are multiples of one pair per axis, but rotations act on blocks of 2
    blocks["so2"] = 2
    groups = [ChannelGroup(n, s, blocks[n]) for n, s in sizes.items() if s]
    triv = head - used
    return [ChannelGroup("triv", triv, 1), *groups] if triv else groups


class Matrices(NamedTuple):
    """The matrices (b or 1, n, copies, s, s) of one group for queries, keys (and values), and the output."""

    q: Tensor
    k: Tensor
    out: Tensor


def poses(extrinsic: Tensor, scale: Tensor) -> Matrices:
    """Return the matrices of SE(3): inverse pose for keys, transposed pose for queries, translations scaled.

    Args:
        extrinsic: (b or 1, n, 4, 4).
        scale: factor of the translations, (1,).
    """
    dtype = torch.promote_types(extrinsic.dtype, scale.dtype)
    pose = extrinsic.to(dtype)
    ones = torch.ones(4, 4, dtype=dtype, device=pose.device)
    column = F.pad(ones[:3, :1], (3, 0, 0, 1))  # 1 at the translation entries
    factor = ones + (scale.to(dtype) - 1) * column
    forward, backward = pose * factor, inverse(pose) * factor
    return Matrices(forward.mT[:, :, None], backward[:, :, None], forward[:, :, None])


def rotations(extrinsic: Tensor, spatial: Tensor, degree: int) -> Matrices:
    """Return the matrices of SO(3) in its representations of degree 1 .. `degree` (1 or 2): 3 or 8 channels."""
    rotation = extrinsic[..., :3, :3].detach().mT  # the rotation of the inverse pose
    matrices = rotation
    if degree > 1:  # degree 2: traceless symmetric matrices, S -> R S R^T
        basis = _traceless(rotation)
        moved = exact_product(exact_product(rotation[..., None, :, :], basis), rotation.mT[..., None, :, :])
        # (b, n, 5, 5): entry (i, j) is the inner product of basis matrix i and the image of j
        second = exact_product(basis.flatten(-2), moved.flatten(-2).mT)
        # block diagonal: 3 channels of degree 1, then 5 of degree 2
        matrices = F.pad(rotation, (0, 5, 0, 5)) + F.pad(second, (3, 0, 3, 0))
    eye = torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)
    matrices = torch.where(spatial[..., None, None], matrices, eye)
    # the inverse of a rotation is its transpose
    return Matrices(matrices[:, :, None], matrices[:, :, None], matrices.mT[:, :, None])


def _traceless(like: Tensor) -> Tensor:
    """Return an orthonormal basis (5, 3, 3) of traceless symmetric matrices."""
    half, third = 0.5**0.5, 6**-0.5
    basis = torch.zeros(5, 3, 3, dtype=like.dtype, device=like.device)
    for i, (a, b) in enumerate(((0, 1), (1, 2), (0, 2))):
        basis[i, a, b] = basis[i, b, a] = half
    basis[3] = torch.diag(basis.new_tensor([-third, -third, 2 * third]))
    basis[4] = torch.diag(basis.new_tensor([half, -half, 0.0]))
    return basis


def circle(angles: Tensor) -> Tensor:
    """Return rotations (..., pairs, 2, 2) by `angles` (..., pairs)."""
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([torch.stack([cos, -sin], -1), torch.stack([sin, cos], -1)], -2)


def shifts(coordinates: Tensor) -> Matrices:
    """Return the matrices of 2D translations (b, n, 2) on triples of channels (homogeneous coordinates)."""
    eye = torch.eye(3, dtype=coordinates.dtype, device=coordinates.device)
    # (b, n, 2) -> (b, n, 3, 3) with the translation in the last row; its inverse has the opposite sign
    row = F.pad(coordinates[..., None, :], (0, 1, 2, 0))
    forward, backward = eye + row, eye - row
    return Matrices(backward.mT[:, :, None], forward[:, :, None], backward[:, :, None])


def angles_of(coordinates: Tensor, freqs: Tensor, top: Tensor) -> Tensor:
    """Return 2 pi top x f (b, n, freqs * axes), axes innermost, for x (b, n, axes), f (freqs,), top (axes,)."""
    # (b, n, 1, axes) * (freqs, 1) -> (b, n, freqs * axes)
    return (2 * math.pi * (coordinates * top)[..., None, :] * freqs[:, None]).flatten(-2)


def joined(groups: list[tuple[ChannelGroup, Matrices | None]], values: bool) -> BlockTransform:
    """Return one block transform of all groups in order, with the smallest blocks that align with the groups.

    Args:
        groups: each group with its matrices, None for the identity.
        values: whether values and outputs are transformed as well.
    """
    matrices_of_keys = [m.k for _, m in groups if m is not None]
    batch, tokens = (max(k.shape[i] for k in matrices_of_keys) for i in (0, 1))
    total = sum(g.size for g, _ in groups)
    block = math.lcm(*(g.block for g, _ in groups))
    aligned = all(g.size % block == 0 for g, _ in groups)
    # blocks of the common size if it divides all groups, else one block for the matrix head
    sides: list[Tensor] = []
    for side in range(3 if values else 2):
        parts: list[Tensor] = []
        start = 0
        for group, matrices in groups:
            one = matrices_of_keys[0].new_ones(1, 1, group.size, 1, 1) if matrices is None else matrices[side]
            one = one.expand(batch, tokens, -1, -1, -1)
            part = _diagonal(one, (block if aligned else group.size) // group.block)
            end = start + group.size
            parts.append(part if aligned else F.pad(part, (start, total - end, start, total - end)))
            start = end
        matrix = torch.cat(parts, 2) if aligned else torch.stack(parts).sum(0)
        sides.append(matrix[:, None])
    q, k = sides[:2]
    return BlockTransform(q=q, k=k, v=k, out=sides[2]) if values else BlockTransform(q=q, k=k)


def _diagonal(matrices: Tensor, count: int) -> Tensor:
    """Return (b, n, c / count, s count, s count) with `count` successive matrices of (b, n, c, s, s) as blocks."""
    if count == 1:
        return matrices
    eye = torch.eye(count, dtype=matrices.dtype, device=matrices.device)
    b, n, c, s, _ = matrices.shape
    # one matrix per diagonal block, zeros elsewhere
    spread = matrices.reshape(b, n, c // count, count, s, 1, s) * eye[:, None, :, None]
    return spread.reshape(b, n, c // count, count * s, count * s)
