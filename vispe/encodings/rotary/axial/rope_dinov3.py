"""RoPE of DINOv3: coordinates from -1 to 1 on every grid (arXiv 2508.10104)."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from vispe.attention.transform.abstract_transform import Layout
from vispe.encodings.parts.coords import exact_device
from vispe.encodings.parts.rotary.rope.axial_pairs import axial_angles, check_split, pair_counts
from vispe.encodings.parts.rotary.rope.rope_base import RopeBase
from vispe.encodings.registry import register
from vispe.errors import OptionError
from vispe.grid import Positions
from vispe.grid.frequencies import inverse_frequencies
from vispe.grid.grid_frequencies import Schedule, grid_frequencies
from vispe.utils.interval import Interval
from vispe.utils.options import PositiveFloat, Shape

NormalizeCoords = Literal["separate", "max", "min"]


@register
class RopeDinov3(RopeBase):
    """Rotates queries and keys by patch positions relative to the image, with the channels divided among the axes.

    c = 2 (i + 1/2) / size - 1; pair k of an axis with K pairs rotates by 2 pi c / temperature^(k / K)   DINOv3 code

    ``rope_dinov3.released`` adds the training augmentation of the released models: sizes rescaled by up to 2.

    Args:
        dim: width of the tokens, d.
        num_heads: heads, h.
        head_dim: channels of a head, d_h; dim / num_heads by default.
        depth: blocks of the model, for `per_block`.
        temperature: ratio of the longest to the shortest period; the shortest is half an image.
        min_period: shortest period, in half images; with `max_period` instead of `temperature`.
        max_period: longest period; periods are spaced geometrically, both ends included.
        normalize_coords: size that divides the coordinates: 'separate' that of each axis (a patch step then rotates
            by different angles along a short side), 'max' or 'min' the largest or smallest of all.
        layout: which channels are a pair: 'half' c and c + pairs, 'interleaved' 2c and 2c + 1. A checkpoint
            works only with its own.
        rotated: fraction of the head channels that are rotated; the others carry content only.
        split: pairs of channels per axis, first axis first; equal parts by default; with three axes, remaining pairs
            are not rotated.
        spacing: distance between neighbouring patches per axis, instead of `Grid.spacing`; with 'max' and 'min'
            sizes are lengths, so that anisotropic voxels keep their proportions.
        schedule: behaviour at other resolutions: 'rescale' is that of DINOv3: every grid spans -1 to 1; 'none'
            keeps the step of the training grid, 'pi' keeps it in smaller grids only, 'ntk' and 'yarn' keep it for fast
            pairs and stretch slow ones.
        reference: training grid for `schedule` and `logit_scale`; the grid that the host was built with by default.
        logit_scale: factor of all logits, those of prefix tokens too: 'none', a number, or by the resolution 'yarn'
            ((0.1 ln s + 1)^2 with s the mean stretch), 'entropy' (ln n / ln n_reference, n patches), 'log_length'
            (that, never below 1) or 'ssmax' (s_h ln n / ln n_reference, with s_h learned per head and layer from 1 on,
            so that it is initially neutral; arXiv 2501.19399 has s_h ln n).
        basis: 'head' multiplies queries by a learned matrix M = U S V^T per head and keys by M^-T, before the rotation,
            those of prefix tokens as well (HARoPE, arXiv 2510.10489). It is initially the identity, with h d_h^2
            parameters and 2 n h d_h^2 products per layer, none after `vispe.fold`.
        basis_key: matrix of the keys: 'inverse_transpose' leaves scores at offset 0 unchanged, 'same' uses M again.
        shift_coords: in training, adds uniform [-s, s] half images per axis.
        jitter_coords: in training, then multiplies each axis by exp of uniform [-ln J, ln J].
        rescale_coords: in training, then multiplies all axes by one such factor.
        per_block: separate draws for every block, as the authors' training does, instead of one draw per forward.

    Shapes: pos.coords (1 or b, n, a) -> tables (1 or b, 1, n, pairs) float32; prefix tokens are not rotated.
    New resolution: see `schedule`.   Cost: no parameters (h with logit_scale=ssmax), O(n d_h) per forward, 3 flops
        per channel of q and k.
    Invariant to: translation in scores between patches of one grid (not of prefix tokens with patches); scaling
        of image and spacing together; norms are preserved (logit_scale=none, basis=none).
    Raises: ShapeError if the training grid is needed and unknown, or options are for other axes than `pos` has;
        OptionError for incompatible options.
    Differs from the reference: one draw per forward unless `per_block`; periods are float64 and tables float32,
        while the released models store periods rounded to bfloat16 (their `rope_embed.periods` are checked, then
        dropped on loading).

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("rope_dinov3", dim=16, num_heads=2)
        >>> encoding.transform(Grid((2, 3)).positions(), 0).query(torch.ones(1, 2, 6, 8)).shape
        torch.Size([1, 2, 6, 8])
    """

    name = "rope_dinov3"
    paper = "DINOv3, https://arxiv.org/abs/2508.10104"
    year = 2025
    encodes = ("distance", "direction")
    invariant = ("translation",)
    formula = (
        r"\theta_k = \frac{2 \pi c}{T^{k / K}}, \quad c = \frac{2 (i + \tfrac{1}{2})}{\mathrm{size}} - 1"
    )
    tested_options = (
        "temperature=50,normalize_coords=max",
        "min_period=0.5,max_period=20,normalize_coords=min",
        "layout=interleaved",
        "split=[2,1,1]",
        "spacing=[5,0.7,0.7]",
        "schedule=none,reference=[2,5,7]",
        "schedule=yarn,reference=[2,2,2]",
        "shift_coords=0.5,jitter_coords=1.3,rescale_coords=2",
        "jitter_coords=1.3,per_block=true",
        "basis=head,basis_key=same",
    )
    presets: ClassVar[dict[str, dict[str, Any]]] = {"released": {"rescale_coords": 2.0}}

    temperature: PositiveFloat = 100.0
    min_period: PositiveFloat | None = None
    max_period: PositiveFloat | None = None
    normalize_coords: NormalizeCoords = "separate"
    layout: Layout = "half"
    rotated: Annotated[float, Interval(above=0, most=1)] = 1.0
    split: Shape | None = None
    schedule = "rescale"

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.min_period, self.max_period
        if (low is None) != (high is None):
            raise OptionError(
                f"min_period and max_period must be set together, got min_period={low}, max_period={high}. Set both "
                f"or neither."
            )
        if low is not None and high is not None and low > high:
            raise OptionError(f"rope_dinov3 needs 0 < min_period <= max_period, got {low:g} and {high:g}.")
        check_split(self.name, self.split, self.pairs)

    @property
    def _default_schedule(self) -> Schedule:
        return "rescale"

    def rename_checkpoint_keys(self, state_dict: dict[str, Any], parent_prefix: str, prefix: str) -> None:
        """Drop the periods that released checkpoints save, once they agree with periods to bfloat16."""
        for name in (f"{parent_prefix}rope_embed.periods", f"{parent_prefix}rope.periods"):
            if name in state_dict:
                saved, periods = state_dict[name].double().cpu(), self.periods(len(state_dict[name]))
                # 2^-7 is the spacing of bfloat16 numbers at 1
                if not torch.allclose(saved, periods, rtol=2**-7):
                    raise OptionError(
                        f"{name} has periods {saved.min():.4g} to {saved.max():.4g} but temperature={self.temperature} "
                        f"gives {periods.min():.4g} to {periods.max():.4g}. Use min_period and max_period."
                    )
                del state_dict[name]

    def periods(self, count: int | None = None) -> Tensor:
        """Return the periods of an axis with `count` pairs (a half of all by default), in half images, float64."""
        count = self.pairs // 2 if count is None else count
        if self.min_period is None or self.max_period is None:
            return 1 / inverse_frequencies(2 * count, self.temperature, torch.float64)
        # log-spaced, both ends included
        way = torch.linspace(0, 1, count, dtype=torch.float64)
        return self.min_period * (self.max_period / self.min_period) ** way

    def _angles(self, pos: Positions, layer: int) -> Tensor:
        # centres of cells from -1 to 1
        size = self._size(pos.extent)
        coords = (pos.coords + pos.cell[:, None] / 2) / size[:, None] * 2 - 1
        coords = self._augmented(coords, None, pos, layer)
        exact = exact_device(coords)
        counts = pair_counts(self.name, self.split, self.pairs, pos.axes)
        # (1, pairs of the axis), radians per half image
        freqs = [(2 * math.pi / self.periods(n))[None].to(exact) for n in counts]
        if self.schedule != "rescale":
            trained = self._size(self._sizes(pos)[1] * pos.cell).to(exact, torch.float64)
            size, cell = (t.to(exact, torch.float64) for t in (size, pos.cell))
            freqs = [self._scheduled(f, size[:, i], trained[:, i], cell[:, i]) for i, f in enumerate(freqs)]
        return axial_angles(coords, freqs, range(pos.axes), self.pairs)

    def _scheduled(self, freqs: Tensor, size: Tensor, trained: Tensor, cell: Tensor) -> Tensor:
        """Return radians per unit of our coordinates from those of the training grid, by way of lengths."""
        # coordinates from -1 to 1 are 2 units per size
        per_length = freqs * 2 / trained[:, None]
        scaled = grid_frequencies(per_length, self.schedule, size / trained, trained, cell=cell)
        return scaled * size[:, None] / 2

    def _size(self, extent: Tensor) -> Tensor:
        """Return what divides the coordinates of each axis, (b or 1, a)."""
        if self.normalize_coords == "separate":
            return extent
        # one size for all axes, which preserves the aspect ratio
        one = extent.amax(-1, True) if self.normalize_coords == "max" else extent.amin(-1, True)
        return one.expand_as(extent)
