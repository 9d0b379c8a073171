"""Base of RoPE variants with angles linear in the coordinates: options, tables, training grid and logit scale."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn

from vispe.attention.precision import at_least_float32
from vispe.attention.transform.abstract_transform import Layout, Transform
from vispe.attention.transform.affine import Affine
from vispe.attention.transform.chain import Chain
from vispe.attention.transform.pairs import PairRotation
from vispe.encodings.parts.rotary.head_basis import BasisKey, HeadBasis
from vispe.encodings.parts.rotary.rope.coords_augmentation import AugmentedRotary
from vispe.encodings.parts.rotary.rope.smallest_base import BaseTooSmall
from vispe.errors import OptionError, ShapeError, counted
from vispe.grid import Grid, Positions
from vispe.grid.grid_frequencies import Schedule
from vispe.utils.interval import Interval
from vispe.utils.options import PositiveFloat, Shape, Spacing

Basis = Literal["none", "head"]
LogitScale = Literal["none", "yarn", "entropy", "log_length", "ssmax"] | PositiveFloat


class RopeBase(AugmentedRotary):
    """Rotates pairs of channels of queries and keys by angles linear in the coordinates.

    Subclasses define `_angles`. The options are shared by all RoPE variants on grids.

    Attributes:
        learned: the angles depend on parameters.
    """

    learned: ClassVar[bool] = False

    ndim = (1, 2, 3)

    layout: Layout = "interleaved"
    rotated: Annotated[float, Interval(above=0, most=1)] = 1.0
    spacing: Spacing | None = None
    schedule: Schedule = "none"
    reference: Shape | None = None
    logit_scale: LogitScale = "none"
    basis: Basis = "none"
    basis_key: BasisKey = "inverse_transpose"

    def __post_init__(self) -> None:
        self.width = self._resolve_head_dim()
        if self.width * self.rotated % self._channel_multiple:
            raise OptionError(
                f"{self.name} needs a head_dim divisible by {self._channel_multiple}, got head_dim={self.width} with "
                f"rotated={self.rotated:g} (dim={self.dim}, num_heads={self.num_heads}). Choose another num_heads or "
                "rotated."
            )
        self.pairs = int(self.width * self.rotated) // 2
        self._check_augmentation()
        self._check_schedule()
        self._key = repr(self.config)  # cache key: all that the tables depend on besides the positions
        if self.logit_scale == "ssmax":
            self.sharpness = nn.Parameter(torch.ones(self.num_heads))
        if self.basis == "head":
            self.head_basis = HeadBasis(self.num_heads, self.width, self.basis_key)
        elif self.basis_key != "inverse_transpose":
            raise OptionError(
                f"basis_key={self.basis_key!r} has no effect with basis='none'. Use basis=head."
            )

    @property
    def per_layer(self) -> bool:
        """Whether the logit scale or the basis is learned, per head and layer."""
        return self.logit_scale == "ssmax" or self.basis == "head"

    def reset_parameters(self) -> None:
        """Set the learned logit scales to 1 and the bases of the heads to the identity."""
        if self.logit_scale == "ssmax":
            nn.init.ones_(self.sharpness)
        if self.basis == "head":
            self.head_basis.reset_parameters()

    @property
    def _channel_multiple(self) -> int:
        """Divisor of the number of rotated channels."""
        return 4

    def base_too_small(self, grid: Grid) -> BaseTooSmall | None:
        """Return a diagnostic if the base is too small for a grid; None if it suffices or there is no base."""
        del grid

    def _check_schedule(self) -> None:
        if self.reference is not None and not self._needs_reference:
            raise OptionError(
                f"reference={list(self.reference)} has no effect with schedule={self.schedule!r}, "
                f"logit_scale={self.logit_scale!r}. Omit it."
            )
        if self.schedule == "align_corners" and self._default_schedule != "none":
            raise OptionError(
                f"schedule='align_corners' needs patch indices, but {self.name} reads fractions of the field. "
                "Use schedule='rescale'."
            )

    @property
    def _default_schedule(self) -> Schedule:
        """The schedule that works without a training grid."""
        return "none"

    @property
    def _needs_reference(self) -> bool:
        """Whether the training grid is needed."""
        scaled = isinstance(self.logit_scale, str) and self.logit_scale != "none"
        return scaled or self.schedule != self._default_schedule

    def transform(self, pos: Positions, layer: int, x: Tensor | None = None) -> Transform:
        """Return the basis, the rotation of block `layer` (identity for tokens without a position), the logit scale."""
        self._need_axes(pos)
        if self.spacing is not None and len(self.spacing) != pos.axes:
            raise ShapeError(
                f"{self.name} needs spacing for {counted(pos.axes, 'axis')}, got spacing={self.spacing}. Pass one "
                "value per axis."
            )

        rotation: Transform = self._rotation(pos, layer)
        if self.basis == "head":
            # before the rotation: after it, scores would depend on absolute positions
            rotation = Chain(self.head_basis.transform(pos), rotation)
        if self.logit_scale == "none":
            return rotation
        # of shape (b or 1, 1, 1, 1)
        factor = pos.remember((self._key, "logits"), lambda: self._logit_factor(pos)[:, None, None, None])
        if self.logit_scale == "ssmax":
            factor = at_least_float32(self.sharpness)[:, None, None] * factor  # (b or 1, h, 1, 1)
        return Chain(rotation, Affine(q_mul=factor))

    def _rotation(self, pos: Positions, layer: int) -> Transform:
        """Return the rotation; computed once for all blocks unless it depends on draws or parameters."""

        def make() -> tuple[Tensor, Tensor]:
            return self._tables(pos, layer)

        # draws and parameters change between forward passes, so these tables are not cached with the positions
        if "rope" in pos.attrs:
            return self._rotate_by(*make())
        if self.learned:
            return self._rotate_by(*self._eval_cache(self, pos, make))
        return pos.remember(self._key, lambda: self._rotate_by(*make()))

    def _rotate_by(self, cos: Tensor, sin: Tensor) -> Transform:
        """Return the transform of tables from `_tables`."""
        return PairRotation(cos, sin, self.layout)

    def _tables(self, pos: Positions, layer: int) -> tuple[Tensor, Tensor]:
        angle = self.angles(pos, layer) * pos.spatial[:, None, :, None]  # (b or 1, h or 1, n, pairs)
        return angle.cos(), angle.sin()

    def angles(self, pos: Positions, layer: int = 0) -> Tensor:
        """Return the angle of every token and pair in block `layer`, (b or 1, h or 1, n, pairs), in radians."""
        self._need_axes(pos)
        return self._angles(pos if self.spacing is None else pos.with_spacing(self.spacing), layer)

    def _angles(self, pos: Positions, layer: int) -> Tensor:
        """Return the angles (b or 1, h or 1, n, pairs) of all tokens, in float32 or better."""
        raise NotImplementedError

    def _sizes(self, pos: Positions) -> tuple[Tensor, Tensor]:
        """Return patches per axis now and in training, (b or 1, a) and (a,).

        Raises:
            ShapeError: the training grid is unknown or has other axes.
        """
        reference = self.reference or (pos.grid.reference if pos.grid is not None else None)
        if reference is None or len(reference) != pos.axes:
            raise ShapeError(
                f"{self.name} with schedule={self.schedule!r}, logit_scale={self.logit_scale!r} needs the training "
                f"grid of {counted(pos.axes, 'axis')}, got reference={reference}. Pass reference=... or "
                "Grid(reference=...)."
            )
        now = pos.extent / pos.cell
        return now, now.new_tensor(reference)

    def _logit_factor(self, pos: Positions) -> Tensor:
        """Return the factor of the logits, (b or 1,), without the learned one."""
        if not isinstance(self.logit_scale, str):
            return pos.coords.new_full((1,), self.logit_scale)
        now, trained = self._sizes(pos)
        if self.logit_scale == "yarn":
            scale = (now / trained).log().mean(-1).exp()  # geometric mean over the axes
            return (0.1 * scale.clamp(min=1).log() + 1).square()
        # uniform attention over n keys has entropy ln n; at least two patches, since ln 1 = 0
        factor = now.prod(-1).clamp(min=2).log() / trained.prod(-1).clamp(min=2).log()
        return factor.clamp(min=1) if self.logit_scale == "log_length" else factor
