"""RoPE with a fixed direction per pair of channels, evenly spread or custom (RoPE: arXiv 2104.09864)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from vispe.encodings.parts.coords import exact_device
from vispe.encodings.parts.rotary.rope.directional_frequencies import golden_frequencies, spiral_frequencies
from vispe.encodings.parts.rotary.rope.rope_base import RopeBase
from vispe.encodings.registry import register
from vispe.errors import OptionError, counted
from vispe.grid import Positions
from vispe.grid.grid_frequencies import Schedule, grid_frequencies
from vispe.utils.options import FiniteFloat, PositiveFloat, PositiveInt, Probability

Directions = Literal["golden", "spiral"]
NormalizeCoords = Literal["separate", "max", "min", "none"]
Frequencies = tuple[tuple[FiniteFloat, ...], ...]
GROUPS = 4


@register
class RopeField(RopeBase):
    """Rotates queries and keys by the coordinates of their patch, each pair of channels along a separate direction.

    Pair f rotates by omega_f . p          omega_f = size_f (cos a_f, sin a_f) on two axes, (x, y)

    Bare ``rope_field``, also called ``rope_field.golden_gate``, is Golden Gate RoPE: a_f = pi f / phi with the golden
    ratio phi, so that directions of pairs of similar magnitude are spread evenly. ``rope_field.spiral`` is Spiral RoPE:
    groups of pairs, a_g = pi g / groups, each with all magnitudes; two groups are axial RoPE. All are nearly isotropic
    without parameters, while `rope_mixed` learns its directions.

    Args:
        dim: width of the tokens, d.
        num_heads: heads, h.
        head_dim: channels of a head, d_h; dim / num_heads by default.
        depth: blocks of the model, for `per_block`.
        directions: 'golden', or 'spiral' in groups. On three axes they are spread over the half sphere, on one axis
            they are all the same.
        groups: groups of directions='spiral', 4 by default.
        min_freq: radians of the slowest pair per unit of the coordinates.
        max_freq: radians of the fastest pair. Magnitudes are spaced geometrically: with 'golden' from slow to
            fast, both ends included; with 'spiral' in each group from fast to slow, without the lower end, as in
            `rope_axial`.
        unrotated: fraction of the pairs, the first ones (of each group), that are not rotated, rounded.
        frequencies: omega of every pair as lists, radians per unit along each axis of the grid, first axis first;
            instead of the options above.
        normalize_coords: unit of the coordinates: half the distance from the first to the last patch, which are then at
            -1 and 1, per axis ('separate'), of the longest ('max') or shortest axis ('min'); or 'none', the unit of the
            spacing.
        layout: which channels are a pair: 'interleaved' 2c and 2c + 1, 'half' c and c + pairs. A checkpoint
            works only with its own.
        rotated: fraction of the head channels that are rotated; the others carry content only.
        spacing: distance between neighbouring patches per axis, instead of `Grid.spacing`.
        schedule: behaviour at other resolutions, per axis: 'rescale' maps the grid onto the training grid, as
            normalised coordinates do, 'none' keeps the angle of a patch step, 'pi' keeps it in smaller
            grids only, 'yarn' keeps it for fast pairs and stretches slow ones. ('ntk' needs ordered frequencies.)
        reference: training grid for `schedule` and `logit_scale`; the grid that the host was built with by default.
        logit_scale: factor of all logits, those of prefix tokens too: 'none', a number, or by the resolution 'yarn'
            ((0.1 ln s + 1)^2 with s the mean stretch), 'entropy' (ln n / ln n_reference, n patches), 'log_length'
            (that, never below 1) or 'ssmax' (s_h ln n / ln n_reference, with s_h learned per head and layer from 1 on,
            so that it is initially neutral; arXiv 2501.19399 has s_h ln n).
        basis: 'head' multiplies queries by a learned matrix M = U S V^T per head and keys by M^-T, before the rotation,
            those of prefix tokens as well (HARoPE, arXiv 2510.10489). It is initially the identity, with h d_h^2
            parameters and 2 n h d_h^2 products per layer, none after `vispe.fold`.
        basis_key: matrix of the keys: 'inverse_transpose' leaves scores at offset 0 unchanged, 'same' uses M again.
        shift_coords: in training, adds uniform [-s, s] per axis, patches with normalize_coords='none', else units.
        jitter_coords: in training, then multiplies each axis by exp of uniform [-ln J, ln J].
        rescale_coords: in training, then multiplies all axes by one such factor.
        per_block: separate draws for every block instead of one draw per forward.

    Shapes: pos.coords (1 or b, n, a) -> tables (1 or b, 1, n, pairs) float32; prefix tokens are not rotated, which is
        the centre of normalised coordinates.
    New resolution: see `schedule`.   Cost: no parameters (h with logit_scale=ssmax), O(n d_h a) per forward, 3 flops
        per channel of q and k.
    Invariant to: translation in scores between patches (not of prefix tokens with patches); norms are preserved
        (logit_scale=none, basis=none); with 'spiral', an even number of groups of equal size and one unit for both
        axes, a quarter turn exchanges the groups.
    Raises: ShapeError if the training grid is needed and unknown, or options are for other axes than `pos` has;
        OptionError for incompatible options.
    Differs from the reference: the sources have two axes; directions on three are ours (the additive recurrence of the
        plastic ratio for 'golden', a Fibonacci lattice for 'spiral'). On a grid that is not square 'separate' stretches
        one axis as Golden Gate RoPE does; 'max' keeps the image's proportions. Of the paper of Spiral RoPE, only the
        abstract was available: groups of equal spectra are ours.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("rope_field", dim=16, num_heads=2)
        >>> encoding.transform(Grid((2, 3)).positions(), 0).query(torch.ones(1, 2, 6, 8)).shape
        torch.Size([1, 2, 6, 8])
    """

    name = "rope_field"
    paper = "On N-dimensional Rotary Positional Embeddings, https://jerryxio.ng/posts/nd-rope"
    year = 2025
    encodes = ("distance", "direction")
    invariant = ("translation",)
    formula = r"\theta_f = \omega_f \cdot p, \quad \omega_f = s_f \, (\cos \alpha_f, \sin \alpha_f)"
    tested_options = (
        "directions=spiral,groups=3,unrotated=0.5,normalize_coords=max",
        "frequencies=[[1,0],[0,1],[0.3,-0.4],[0,0]],normalize_coords=none,schedule=yarn,reference=[2,5]",
        "normalize_coords=min,schedule=pi,reference=[2,5,7],shift_coords=0.5",
        "layout=half,rotated=0.5,logit_scale=ssmax",
        "basis=head,layout=half",
    )
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "golden_gate": {"directions": "golden", "min_freq": 0.2, "max_freq": 20.0},
        "spiral": {
            "directions": "spiral",
            "min_freq": 0.01,
            "max_freq": 1.0,
            "normalize_coords": "none",
            "schedule": "none",
        },
    }

    directions: Directions = "golden"
    groups: PositiveInt | None = None
    min_freq: PositiveFloat = 0.2
    max_freq: PositiveFloat = 20.0
    unrotated: Probability = 0.0
    frequencies: Frequencies | None = None
    normalize_coords: NormalizeCoords = "separate"
    schedule: Schedule = "rescale"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule == "ntk":
            raise OptionError(
                "schedule='ntk' needs frequencies in order, but those of rope_field have directions. Choose 'yarn'."
            )
        if self.min_freq > self.max_freq:
            raise OptionError(
                f"rope_field needs min_freq <= max_freq, got {self.min_freq:g} and {self.max_freq:g}. Swap them."
            )
        if self.groups is not None and self.directions != "spiral":
            raise OptionError(
                f"groups={self.groups} has no effect with directions={self.directions!r}. Use directions='spiral'."
            )
        if self.directions == "spiral" and self.frequencies is None and self.pairs < (self.groups or GROUPS):
            raise OptionError(
                f"rope_field needs a pair of channels for each of {counted(self.groups or GROUPS, 'group')}, got "
                f"{counted(self.pairs, 'pair')}. Use fewer groups."
            )
        self._check_frequencies()

    def _check_frequencies(self) -> None:
        """Check custom frequencies, and that no other option sets them."""
        frequencies = self.frequencies
        if frequencies is None:
            return
        names = ("directions", "groups", "min_freq", "max_freq", "unrotated")
        changed = [n for n in names if getattr(self, n) != getattr(type(self), n)]
        if changed:
            raise OptionError(f"{', '.join(changed)} has no effect with frequencies. Omit it.")
        axes = {len(omega) for omega in frequencies}
        if len(frequencies) != self.pairs or len(axes) != 1 or not axes <= {1, 2, 3}:
            raise OptionError(
                "frequencies needs a list of 1 to 3 numbers, one for each axis, for each of "
                f"{counted(self.pairs, 'pair')}, got {counted(len(frequencies), 'list')} of "
                f"{counted(' or '.join(map(str, sorted(axes))), 'number')}."
            )
        self._accept(*axes)

    @property
    def _channel_multiple(self) -> int:
        return 2

    @property
    def _default_schedule(self) -> Schedule:
        return "none" if self.normalize_coords == "none" else "rescale"

    def field(self, axes: int) -> Tensor:
        """Return omega, radians per unit of the coordinates along each axis of the grid, (pairs, axes) float64."""
        if self.frequencies is not None:
            return torch.tensor(self.frequencies, dtype=torch.float64)
        options = self.pairs, axes, self.min_freq, self.max_freq, self.unrotated
        if self.directions == "golden":
            return golden_frequencies(*options)
        return spiral_frequencies(*options, self.groups or GROUPS)

    def _angles(self, pos: Positions, layer: int) -> Tensor:
        # unit: half the distance from the first to the last patch; origin: the centre
        coords, unnormalized = pos.coords, self.normalize_coords == "none"
        if not unnormalized:
            coords = coords / self._unit(pos.extent, pos.cell)[:, None] - 1
        coords = self._augmented(coords, pos.cell if unnormalized else None, pos, layer)
        # elementwise products: autocast would round a matrix product
        angle = coords.new_zeros(())
        for axis, freqs in enumerate(self._scheduled(pos)):
            angle = angle + coords[..., axis, None] * freqs[:, None].to(coords)
        # (b or 1, n, pairs) -> (b or 1, 1, n, pairs)
        return angle[:, None]

    def _scheduled(self, pos: Positions) -> list[Tensor]:
        """Return radians per unit of the coordinates for each axis, (b or 1, pairs) float64."""
        exact = exact_device(pos.coords)
        unscheduled = [f[None] for f in self.field(pos.axes).to(exact).unbind(1)]
        if self.schedule == self._default_schedule:
            return unscheduled
        # convert via lengths, which both grids share
        now, trained = (t.to(exact, torch.float64) for t in self._sizes(pos))
        cell = pos.cell.to(exact, torch.float64)
        unit, before, scale = torch.ones_like(cell), torch.ones_like(cell), now / trained
        if self.normalize_coords != "none":
            unit, before = self._unit(now * cell, cell), self._unit(trained * cell, cell)
            scale = unit / before
        length = trained * cell
        return [
            # radians per unit of the training grid -> per length, scheduled -> per unit of this grid
            grid_frequencies(
                f / before[:, i, None], self.schedule, scale[:, i], length[:, i], cell=cell[:, i]
            )
            * unit[:, i, None]
            for i, f in enumerate(unscheduled)
        ]

    def _unit(self, extent: Tensor, cell: Tensor) -> Tensor:
        """Return half the distance from the first to the last patch along each axis, (b or 1, a)."""
        size = (extent - cell) / 2
        if self.normalize_coords != "separate":
            one = size.amax(-1, True) if self.normalize_coords == "max" else size.amin(-1, True)
            size = one.expand_as(size)
        return torch.where(size > 0, size, cell)  # a single patch has no extent
