"""GTA: queries, keys and values in the coordinate frame of their token's geometry (arXiv 2310.10375)."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from vispe.attention.precision import at_least_float32
from vispe.attention.transform.abstract_transform import Transform
from vispe.attention.transform.pairs import PairRotation
from vispe.encodings.base import Rotary
from vispe.encodings.parts.resample import training_grid
from vispe.encodings.parts.rotary.cameras import EXTRINSIC, per_token
from vispe.encodings.parts.rotary.gta_representations import (
    ChannelGroup,
    Matrices,
    angles_of,
    channel_groups,
    circle,
    joined,
    poses,
    rotations,
    shifts,
)
from vispe.encodings.registry import register
from vispe.errors import OptionError, ShapeError
from vispe.grid import PerToken, Positions
from vispe.utils.interval import Interval
from vispe.utils.options import (
    Axes,
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    check_per_axis,
)

Normalize = Literal["axis", "train", "none"]
POSES = ("gta", "poses", 4)


@register
class GTA(Rotary):
    """Expresses queries, keys and values in the frame of their token, and the output in that of its query.

    q' = rho(g)^-T q, k' = rho(g) k, v' = rho(g) v, out = rho(g)^-1 out'                arXiv 2310.10375

    rho acts on groups of the d channels of a head, in this order: triv (identity), se3 and so3 (pose of the camera),
    so2 and t2 (position in the image). Images need only so2: axial RoPE that also rotates values, so that attended
    values are expressed relative to the query. Bare ``gta`` gives it all channels. The authors' settings for multi-view
    scenes are ``gta(se3=32,so2=32)`` for 64 channels per head (CLEVR-TR) and ``gta(se3=48,so2=48)`` for 96 (MSN-Hard).

    Poses are read from `Positions.attrs['extrinsic']`: (b or 1, views, 4, 4), tokens in view-major order, or `PerToken`
    with (b or 1, n, 4, 4); they are the matrices E whose inverse is rho.

    Args:
        dim: width of the tokens; its channels per head are d.
        num_heads: heads, h.
        head_dim: channels of a head, d_h; dim / num_heads by default.
        axes: number of axes, 1 to 3 (t2 needs 2).
        se3: channels with the 4 x 4 matrix of the camera pose, a multiple of 4.
        so3: channels with the rotation of the inverse camera pose (no gradient), a multiple of 3 (so3_degree=1) or 8.
        so2: channels rotated by the position, a multiple of 2 * axes; by default all remaining ones.
        t2: channels with 3 x 3 matrices of the translation in the image, a multiple of 3. The remainder is triv.
        so3_degree: 1 for vectors, 2 for vectors and traceless symmetric matrices.
        values: also transform values and outputs; otherwise only scores are relative.
        max_freq: periods of the fastest channel over a coordinate of 1, one for all axes or one each.
        share_freqs: all so2 frequencies equal max_freq; otherwise they are max_freq * 2 ** -k.
        normalize: 'axis' has coordinates i / n per axis, whatever the spacing; 'train' divides coordinates by n_train:
            i / n_train with a spacing of 1, the same for a patch at every resolution; 'none' leaves units of
            `Grid.spacing`.
        reference: grid of the training resolution, n_train; `Grid.reference` by default, else the grid itself.
        trans_coeff: initial value of the learned factor of pose translations, one per layer.

    Shapes: pos (n, axes) -> tables (1, 1, n, pairs), or matrices (b, 1, n, blocks, s, s) with other groups.
    New resolution: 'axis' interpolates, 'train' extrapolates; nothing is resampled.   Cost: no parameters (se3: one per
        layer); twice the rotations of RoPE, on v and the output.
    Invariant to: translation in coordinates; a common motion of all cameras (E -> E M).
    Raises: ShapeError if `pos` has other axes or lacks required poses; OptionError for
        incompatible options.
    Differs from the reference: coordinates increase from left to right and top to bottom (in the reference they
        decrease, which mirrors every angle); prefix tokens are unchanged; so3 works without se3, in a different
        orthonormal basis; the ablations with Euclidean similarity and elementwise factors are not included.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("gta", dim=16, num_heads=2)
        >>> encoding.transform(Grid((2, 3)).positions(), 0).query(torch.ones(1, 2, 6, 8)).shape
        torch.Size([1, 2, 6, 8])
    """

    name = "gta"
    paper = "GTA: A Geometry-Aware Attention Mechanism for Multi-View Transformers, https://arxiv.org/abs/2310.10375"
    year = 2023
    ndim = (1, 2, 3)
    encodes = ("distance", "direction")
    invariant = ("translation",)
    formula = (
        r"q' = \rho(g)^{-\top} q, \quad k' = \rho(g) \, k, \quad v' = \rho(g) \, v, \quad o = "
        r"\rho(g)^{-1} o'"
    )
    tested_options = (
        "values=false",
        "so2=4",
        "so2=4,t2=3",
        "share_freqs=true,max_freq=[1,3]",
        "normalize=train,reference=[5,7]",
        "normalize=none,max_freq=0.1",
        "axes=1",
        "axes=3",
    )

    dim: PositiveInt
    num_heads: PositiveInt
    head_dim: PositiveInt | None = None
    axes: Axes = 2
    se3: Annotated[int, Interval(least=0, step=4)] = 0
    so3: NonNegativeInt = 0
    so2: NonNegativeInt | None = None
    t2: Annotated[int, Interval(least=0, step=3)] = 0
    so3_degree: Literal[1, 2] = 2
    values: bool = True
    max_freq: NonNegativeFloat | tuple[NonNegativeFloat, ...] = 1.0
    share_freqs: bool = False
    normalize: Normalize = "axis"
    reference: tuple[PositiveInt, ...] | None = None
    trans_coeff: FiniteFloat = 0.01

    def __post_init__(self) -> None:
        self._accept(self.axes)
        self.head = self._resolve_head_dim()
        if self.so3 == 0 and self.so3_degree != 2:
            raise OptionError(f"so3_degree={self.so3_degree} has no effect without so3 channels. Use so3=...")
        if not self.se3 and self.trans_coeff != 0.01:
            raise OptionError(
                f"trans_coeff={self.trans_coeff} has no effect without se3 channels. Use se3=..."
            )
        self.groups = channel_groups(
            self.head, self.axes, self.se3, self.so3, self.so2, self.t2, self.so3_degree
        )
        used = self.normalize == "train"
        self.reference = training_grid(self.reference, self.axes, used, f"normalize={self.normalize!r}")
        each = self.max_freq if isinstance(self.max_freq, tuple) else (self.max_freq,) * self.axes
        self.top = tuple(map(float, each))
        check_per_axis("max_freq", each, self.axes)
        if self.se3:
            self.scale = nn.Parameter(torch.empty(1))
            self.reset_parameters()

    @property
    def per_layer(self) -> bool:
        """Whether there is a factor of translations, which is per layer."""
        return bool(self.se3)

    def reset_parameters(self) -> None:
        """Set the factor of translations to `trans_coeff`."""
        if self.se3:
            nn.init.constant_(self.scale, self.trans_coeff)

    def prepare(
        self, pos: Positions, generator: torch.Generator | None = None, draws: dict[str, Tensor] | None = None
    ) -> Positions:
        """Assign to every token the pose of its view, so that both are dropped together."""
        if not (self.se3 or self.so3) or not isinstance(pos.attrs.get(EXTRINSIC), Tensor):
            return pos
        return pos.replace(attrs={**pos.attrs, EXTRINSIC: per_token(pos, pos.attrs[EXTRINSIC], *POSES)})

    def _poses(self, pos: Positions) -> Tensor:
        """Return the pose of every token (b or 1, n, 4, 4), the identity for tokens without a position."""
        supplied = pos.attrs.get(EXTRINSIC)
        if supplied is None:
            raise ShapeError(
                f"gta with se3 or so3 channels needs camera poses, got none. Put (b, views, 4, 4) matrices into "
                f"Positions.attrs[{EXTRINSIC!r}]."
            )
        poses_per_token = supplied if isinstance(supplied, PerToken) else per_token(pos, supplied, *POSES)
        # the pose of tokens without a position is the identity
        eye = torch.eye(4, dtype=poses_per_token.values.dtype, device=poses_per_token.values.device)
        return torch.where(pos.spatial[..., None, None], poses_per_token.values, eye)

    def coordinates(self, pos: Positions) -> Tensor:
        """Return the coordinates (b or 1, n, axes) in fractions of the image, 0 for tokens without a position."""
        x = pos.coords
        if self.normalize == "axis":
            # fractions of the field of this grid
            x = x / pos.extent[:, None]
        elif self.normalize == "train":
            trained = self.reference or (pos.grid and (pos.grid.reference or pos.grid.shape))
            # number of cells at training; without a training grid, that of this grid
            x = x / (pos.extent / pos.cell if trained is None else x.new_tensor(trained)[None])[:, None]
        return x * pos.spatial[..., None]

    def angles(self, pos: Positions) -> Tensor:
        """Return the angles of so2 (b or 1, n, pairs): frequencies from slow to fast, x before y in each."""
        size = next((g.size for g in self.groups if g.name == "so2"), 0)
        count = size // (2 * self.axes)
        # octaves: 2^(1 - count) to 1, times `max_freq`
        powers = torch.arange(1 - count, 1, dtype=pos.coords.dtype, device=pos.coords.device)
        freqs = torch.ones_like(powers) if self.share_freqs else 2.0**powers
        top = pos.coords.new_tensor(self.top)
        # axes in reverse order: x before y
        return angles_of(self.coordinates(pos).flip(-1), freqs, top.flip(-1))

    def transform(self, pos: Positions, layer: int, x: Tensor | None = None) -> Transform:
        """Return the transform of queries, keys, values and outputs."""
        self._need_axes(pos)
        names = [g.name for g in self.groups]
        skip = self.groups[0].size if names[0] == "triv" else 0
        # an odd number of identity channels would split a pair of the interleaved layout
        if set(names) <= {"triv", "so2"} and skip % 2 == 0:
            key = (self.name, skip, self.head, self.top, self.share_freqs, self.normalize, self.reference)
            cos, sin = pos.remember(key, lambda: self._tables(pos, skip // 2))
            return PairRotation(cos, sin, "interleaved", self.values)
        return joined([(g, self._matrices(g, pos)) for g in self.groups], self.values)

    def _tables(self, pos: Positions, skip: int) -> tuple[Tensor, Tensor]:
        angles = self.angles(pos)[:, None]
        # identity channels come first: pairs with angle 0
        angles = torch.cat([angles.new_zeros(*angles.shape[:-1], skip), angles], -1)
        return angles.cos(), angles.sin()

    def _matrices(self, group: ChannelGroup, pos: Positions) -> Matrices | None:
        if group.name == "triv":
            return None
        if group.name == "so2":
            rotation = circle(self.angles(pos))
            # rotations are orthogonal: rho^-T = rho, and the inverse is the transpose
            return Matrices(rotation, rotation, rotation.mT)
        if group.name == "t2":
            matrices = shifts(self.coordinates(pos).flip(-1))
        elif group.name == "se3":
            matrices = poses(at_least_float32(self._poses(pos)), at_least_float32(self.scale))
        else:
            matrices = rotations(at_least_float32(self._poses(pos)), pos.spatial, self.so3_degree)
        # the same matrix for all blocks of a group
        copies = group.size // group.block
        return Matrices(*(m.expand(-1, -1, copies, -1, -1) for m in matrices))
