"""Base of RoPE variants with angles linear in the coordinates: augmentation, length-extension schedules, tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vispe.attention.precision import at_least_float32
from vispe.attention.transform.abstract_transform import Layout, Transform
from vispe.attention.transform.affine import Affine
from vispe.attention.transform.chain import Chain
from vispe.attention.transform.pairs import PairRotation
from vispe.encodings.base import Rotary
from vispe.encodings.parts.rotary.head_basis import BasisKey, HeadBasis
from vispe.errors import OptionError, ShapeError, counted
from vispe.grid import Grid, Positions
from vispe.grid.grid_frequencies import Schedule
from vispe.utils.interval import Interval
from vispe.utils.options import NonNegativeFloat, PositiveFloat, PositiveInt, Shape, Spacing

Basis = Literal["none", "head"]
LogitScale = Literal["none", "yarn", "entropy", "log_length", "ssmax"] | PositiveFloat
AUGMENTATIONS = ("shift_coords", "jitter_coords", "rescale_coords")


class Draws(NamedTuple):
    """Coordinate augmentation of one forward pass; each (1 or blocks, axes or 1), or None."""

    shift_coords: Tensor | None = None
    jitter_coords: Tensor | None = None
    rescale_coords: Tensor | None = None

    def apply(self, coords: Tensor, cell: Tensor | None, layer: int) -> Tensor:
        """Return augmented coordinates (b, n, a); shifts are in units of `cell` (b, a)."""
        # one row for all blocks, or one per block
        shift, jitter, rescale = (None if d is None else d[min(layer, len(d) - 1)].to(coords) for d in self)
        if shift is not None:
            coords = coords + (shift if cell is None else shift * cell[:, None])
        if jitter is not None:
            coords = coords * jitter
        return coords if rescale is None else coords * rescale


class BaseTooSmall(NamedTuple):
    """Diagnostic of a RoPE base that is too small for a grid.

    Attributes:
        name: name of the encoding.
        base: its base (temperature).
        needed: smallest suitable base of the grid, by `min_base`.
        side: patches along the axis with the largest requirement.
        pairs: pairs of channels of that axis.
    """

    name: str
    base: float
    needed: float
    side: int
    pairs: int

    @property
    def far(self) -> bool:
        """Whether it is too small by more than a factor of 2; smaller deviations have little effect."""
        return self.needed > 2 * self.base

    def __str__(self) -> str:
        return (
            f"{self.name} has temperature={self.base:g}, but a side of {counted(self.side, 'patch')} "
            f"({counted(self.pairs, 'pair')}) needs {math.ceil(self.needed)}: below this, similar patches at some "
            "distances score lower than unrelated ones"
        )


class RopeBase(Rotary):
    """Rotates pairs of channels of queries and keys by angles linear in the coordinates.

    Subclasses define `_angles`. The options are shared by all RoPE variants on grids.

    Attributes:
        learned: the angles depend on parameters.
    """

    learned: ClassVar[bool] = False

    ndim = (1, 2, 3)

    dim: PositiveInt
    num_heads: PositiveInt
    head_dim: PositiveInt | None = None
    depth: PositiveInt | None = None
    layout: Layout = "interleaved"
    rotated: Annotated[float, Interval(above=0, most=1)] = 1.0
    spacing: Spacing | None = None
    schedule: Schedule = "none"
    reference: Shape | None = None
    logit_scale: LogitScale = "none"
    basis: Basis = "none"
    basis_key: BasisKey = "inverse_transpose"
    shift_coords: NonNegativeFloat | None = None
    jitter_coords: Annotated[float, Interval(least=1)] | None = None
    rescale_coords: Annotated[float, Interval(least=1)] | None = None
    per_block: bool = False

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

    def _check_augmentation(self) -> None:
        if self.per_block and all(getattr(self, name) is None for name in AUGMENTATIONS):
            raise OptionError(
                f"per_block=True has no effect without {', '.join(AUGMENTATIONS)}. Set one of them."
            )
        if self.per_block and self.depth is None:
            raise OptionError(
                "per_block=True draws for every block of the model, got depth=None. Pass depth."
            )

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

    def prepare(
        self, pos: Positions, generator: torch.Generator | None = None, draws: dict[str, Tensor] | None = None
    ) -> Positions:
        """Draw the augmentation of this forward pass while training.

        `draws` may contain shift_coords (axes,), jitter_coords (axes,) and rescale_coords (1,), the last two as
        factors; with `per_block`, each with a first axis of `depth`. Supplied draws also apply in evaluation.
        """
        supplied = {name: d for name, d in (draws or {}).items() if name in AUGMENTATIONS}
        if not supplied and (not self.training or "rope" in pos.attrs):
            return pos
        drawn: dict[str, Tensor] = {}
        for name, axes in zip(AUGMENTATIONS, (pos.axes, pos.axes, 1), strict=True):
            limit = getattr(self, name)
            shape = (self.depth if self.per_block and self.depth else 1, axes)
            if limit is not None and name in supplied:
                drawn[name] = self._checked_draw(name, supplied[name], shape)
            elif limit is not None and self.training:
                # uniform in [-1, 1]; as a factor, log-uniform in [1 / limit, limit]
                unit = torch.rand(shape, generator=generator, device=pos.coords.device) * 2 - 1
                drawn[name] = unit * limit if name == "shift_coords" else (unit * math.log(limit)).exp()
        return pos.replace(attrs={**pos.attrs, "rope": Draws(**drawn)}) if drawn else pos

    def _checked_draw(self, name: str, draw: Tensor, shape: tuple[int, int]) -> Tensor:
        draw = draw[None] if draw.ndim == 1 else draw
        if tuple(draw.shape) != shape:
            raise ShapeError(f"{self.name} needs a draw of {name} of shape {shape}, got {tuple(draw.shape)}.")
        return draw

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


def check_split(name: str, split: tuple[int, ...] | None, pairs: int) -> None:
    """Raise `OptionError` if `split` exceeds the number of pairs."""
    if split is not None and sum(split) > pairs:
        raise OptionError(
            f"split needs a number of pairs above 0 per axis, at most {pairs} in total for {name}, "
            f"got split={list(split)}."
        )


def pair_counts(name: str, split: tuple[int, ...] | None, pairs: int, axes: int) -> list[int]:
    """Return the pairs of each axis, in the order of the axes."""
    if split is None:
        counts = [pairs // axes] * axes  # remaining pairs are not rotated
        if not counts[0]:
            raise ShapeError(
                f"{name} needs a pair of channels per axis, got {counted(pairs, 'pair')} for {counted(axes, 'axis')}."
            )
        return counts
    if len(split) != axes:
        raise ShapeError(
            f"{name} needs split for {counted(axes, 'axis')}, got split={split}. Pass pairs per axis."
        )
    return list(split)


def axial_angles(
    coords: Tensor,
    freqs: list[Tensor],
    order: Sequence[int],
    pairs: int,
    unrotated: int = 0,
    alternate: bool = False,
) -> Tensor:
    """Return angles (b or 1, 1, n, pairs): zeros, axis after axis in `order`, then zeros.

    Args:
        coords: (b or 1, n, a).
        freqs: per axis (b or 1, pairs of the axis).
        order: axes, in the order of their channels.
        pairs: total number of pairs.
        unrotated: leading pairs that are not rotated.
        alternate: axes alternate from pair to pair instead, for axes with equal numbers of pairs.
    """
    # of shape (b or 1, n, 1) * (b or 1, 1, pairs of the axis)
    parts = [coords[..., axis, None] * freqs[axis][:, None].to(coords) for axis in order]
    # alternating: (b, n, pairs of an axis, axes) -> (b, n, pairs)
    angle = torch.stack(parts, -1).flatten(-2) if alternate else torch.cat(parts, -1)
    rest = pairs - unrotated - angle.shape[-1]
    return F.pad(angle, (unrotated, rest))[:, None] if unrotated or rest else angle[:, None]
