"""Axial RoPE: each part of the channels is rotated by one coordinate (arXiv 2403.13298; RoPE: arXiv 2104.09864)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from vispe.attention.transform.abstract_transform import Layout, Transform
from vispe.attention.transform.channel_tables import ChannelTables
from vispe.encodings.parts.coords import exact_device
from vispe.encodings.parts.rotary.rope.axial_pairs import axial_angles, check_split, pair_counts
from vispe.encodings.parts.rotary.rope.rope_base import RopeBase
from vispe.encodings.parts.rotary.rope.smallest_base import BaseTooSmall, diagnose_base
from vispe.encodings.registry import register
from vispe.errors import OptionError
from vispe.grid import Grid, Positions
from vispe.grid.frequencies import inverse_frequencies
from vispe.grid.grid_frequencies import grid_frequencies, p_rope
from vispe.utils.interval import Interval
from vispe.utils.options import FiniteFloat, PositiveFloat, Probability, Shape, UnitInterval


@register
class RopeAxial(RopeBase):
    """Rotates queries and keys by the coordinates of their patch, with a part of the channels per axis.

    Pair j of an axis with J pairs rotates by coordinate * temperature^(-j / J)          arXiv 2403.13298

    Bare ``rope_axial``, also called ``rope_axial.ropevit``, has the settings of the released rope-vit models;
    ``rope_axial.eva`` has those of EVA-02 and ``rope_axial.pe`` those of the Perception Encoder. On three axes
    it is the axial RoPE of volumes and video tubelets, with `spacing` for anisotropic voxels.
    ``rope_axial.p_rope`` rotates only the fast pairs of each axis (arXiv 2410.06205), so that the others carry
    content independent of distance; on one axis it is p-RoPE itself. ``rope_axial.flux`` has the rotation of Flux
    and Meissonic (arXiv 2410.08261), with (16, 56, 56) of 128 channels for (time, y, x): those of time are not rotated
    in an image. Text before it is at the corner, at patch (0, 0): this is the identity, as here.
    ``rope_axial.vjepa2`` has the tables of V-JEPA 2 on (frame, row, column), ``rope_axial.vjepa21`` those of V-JEPA
    2.1, whose rows and columns are interpolated to those of ``reference`` (16 x 16, or 18 x 18 for patches of 14
    pixels; the number of frames in it has no effect); without interpolation, add ``schedule=none``.
    ``rope_axial.moonvit`` is the rotation of Kimi's vision towers (arXiv 2504.07491), by rows and columns only, also
    in videos; ``rope_axial.minimax`` that of MiniMax M3 VL, by frame, row and column. `vispe.grid.packed_positions`
    returns the positions of their packed patches.

    Args:
        dim: width of the tokens, d.
        num_heads: heads, h.
        head_dim: channels of a head, d_h; dim / num_heads by default.
        depth: blocks of the model, for `per_block`.
        temperature: ratio of the longest to the shortest wavelength; the shortest is 2 pi units of the spacing. 100 is
            enough for a side of 24 patches with heads of 64 channels, 318 for one of 64
            (`vispe.grid.grid_frequencies.min_base`); hosts warn if it is too small.
        indexing: 'xy' gives the first channels to the last axis (x, then y), 'ij' to the first axis.
        layout: which channels are a pair: 'interleaved' 2c and 2c + 1, 'half' c and c + pairs. A checkpoint
            works only with its own.
        duplicate: how the angles of an axis with J pairs cover its 2 J channels: 'interleave' uses angle j for channels
            2j and 2j + 1, 'repeat' uses angle c mod J for channel c, although channels 2j and 2j + 1 are mixed.
            Released V-JEPA 2 weights need 'repeat'. It is not a rotation: norms and scores depend on
            absolute positions.
        offset: added to the patch indices. It affects scores between class tokens and patches.
        rotated: fraction of the head channels that are rotated; the others carry content only.
        split: pairs of channels per axis, first axis first; equal parts by default; with three axes, remaining pairs
            are not rotated.
        rotary_ratio: fraction p of the pairs of each axis that are rotated, the fastest, rounded down (p-RoPE). Their
            frequencies are unchanged, while `rotated` spreads all frequencies over fewer channels.
        unrotated: fraction of the pairs, the first ones, that belong to no axis and are not rotated.
        alternate: axes alternate from pair to pair, in the order of `indexing`, instead of one part of the pairs after
            the other; frequencies per axis are unchanged. It needs equal numbers of pairs per axis.
        tail: with ``layout='half'``, channels of the pairs that remain when all axes have theirs: 'halves', the end of
            both halves of the head; 'end', the end of the head, so that the halves of its first channels are rotated.
        spacing: distance between neighbouring patches per axis, instead of `Grid.spacing`.
        schedule: behaviour at other resolutions, per axis: 'none' extrapolates patch indices, 'rescale'
            maps them onto the training grid, 'align_corners' maps the first and last patch onto those of the training
            grid, 'pi' rescales larger grids only, 'ntk' stretches slow pairs more than fast ones, 'yarn' stretches only
            pairs with less than one period in the training grid.
        schedule_axes: axes of `schedule`: 'all', or 'space', which excludes the frames of three axes. With 'space', any
            head_dim is accepted, and channels that are not part of a pair of each axis are not rotated.
        reference: training grid for `schedule` and `logit_scale`; the grid that the host was built with by default.
        logit_scale: factor of all logits, those of prefix tokens too: 'none', a number, or by the resolution 'yarn'
            ((0.1 ln s + 1)^2 with s the mean stretch), 'entropy' (ln n / ln n_reference, n patches), 'log_length'
            (that, never below 1) or 'ssmax' (s_h ln n / ln n_reference, with s_h learned per head and layer from 1 on,
            so that it is initially neutral; arXiv 2501.19399 has s_h ln n).
        basis: 'head' multiplies queries by a learned matrix M = U S V^T per head and keys by M^-T, before the rotation,
            those of prefix tokens as well (HARoPE, arXiv 2510.10489). It is initially the identity, with h d_h^2
            parameters and 2 n h d_h^2 products per layer, none after `vispe.fold`.
        basis_key: matrix of the keys: 'inverse_transpose' leaves scores at offset 0 unchanged, 'same' uses M again.
        shift_coords: in training, adds uniform [-s, s] patches per axis.
        jitter_coords: in training, then multiplies each axis by exp of uniform [-ln J, ln J].
        rescale_coords: in training, then multiplies all axes by one such factor.
        per_block: separate draws for every block instead of one draw per forward.

    Shapes: pos.coords (1 or b, n, a) -> tables (1 or b, 1, n, pairs) float32; prefix tokens are not rotated.
    New resolution: see `schedule`.   Cost: no parameters (h with logit_scale=ssmax), O(n d_h) per forward, 3 flops
        per channel of q and k.
    Invariant to: translation in scores between patches (not of prefix tokens with patches); norms are preserved
        (logit_scale=none, basis=none). Neither holds for duplicate=repeat. A rotation of the grid by 90 degrees
        exchanges the channel groups of the axes.
    Raises: ShapeError if the training grid is needed and unknown, or options are for other axes than `pos` has;
        OptionError for incompatible options.
    Differs from the reference: tables are computed from the coordinates of each grid; rope-vit reuses them whenever
        the number of tokens agrees, so that 14 x 14 tables are used for 7 x 28 patches. p-RoPE is defined on one axis;
        here its rule is applied per axis.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("rope_axial", dim=16, num_heads=2)
        >>> encoding.transform(Grid((2, 3)).positions(), 0).query(torch.ones(1, 2, 6, 8)).shape
        torch.Size([1, 2, 6, 8])
    """

    name = "rope_axial"
    paper = "Rotary Position Embedding for Vision Transformer, https://arxiv.org/abs/2403.13298"
    year = 2024
    encodes = ("distance", "direction")
    invariant = ("translation",)
    formula = r"\theta_{aj}(p) = p_a \, T^{-j / J}, \quad q'_j = e^{i \theta_{aj}(p)} q_j"
    tested_options = (
        "temperature=50,indexing=ij",
        "layout=half,offset=1",
        "split=[2,1,1]",
        "spacing=[5,0.7,0.7]",
        "schedule=rescale,reference=[2,5,7]",
        "schedule=pi,reference=[2,2,2]",
        "schedule=ntk,reference=[2,2,2]",
        "schedule=yarn,reference=[2,2,2]",
        "shift_coords=0.5,jitter_coords=1.3,rescale_coords=2",
        "jitter_coords=1.3,per_block=true",
        "unrotated=0.25,split=[1,1,1]",
        "logit_scale=ssmax",
        "basis=head",
        "schedule=align_corners,reference=[2,5,7]",
        "duplicate=repeat,unrotated=0.25",
        "duplicate=repeat,schedule=rescale,schedule_axes=space,reference=[2,5,7]",
        "alternate=true",
        "alternate=true,indexing=ij,layout=half,unrotated=0.25",
        "layout=half,tail=end,split=[1,2,1]",
    )
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "ropevit": {"temperature": 100.0, "indexing": "xy"},
        "eva": {"temperature": 10000.0, "indexing": "ij", "schedule": "rescale"},
        "pe": {"temperature": 10000.0, "indexing": "xy", "offset": 1.0, "schedule": "rescale"},
        "p_rope": {"temperature": 10000.0, "layout": "half", "rotary_ratio": 0.75},
        "flux": {"temperature": 10000.0, "indexing": "ij", "unrotated": 0.125},
        "vjepa2": {"temperature": 10000.0, "indexing": "ij", "duplicate": "repeat", "schedule_axes": "space"},
        "vjepa21": {
            "temperature": 10000.0,
            "indexing": "ij",
            "schedule": "align_corners",
            "schedule_axes": "space",
        },
        "moonvit": {"temperature": 10000.0, "indexing": "xy", "layout": "half", "alternate": True},
        "minimax": {"temperature": 10000.0, "indexing": "ij", "layout": "half", "tail": "end"},
    }
    preset_invariant: ClassVar[dict[str, tuple[str, ...]]] = {"vjepa2": ()}

    temperature: PositiveFloat = 100.0
    indexing: Literal["xy", "ij"] = "xy"
    layout: Layout = "interleaved"
    duplicate: Literal["interleave", "repeat"] = "interleave"
    offset: FiniteFloat = 0.0
    rotated: Annotated[float, Interval(above=0, most=1)] = 1.0
    split: Shape | None = None
    rotary_ratio: UnitInterval = 1.0
    unrotated: Probability = 0.0
    alternate: bool = False
    tail: Literal["halves", "end"] = "halves"
    schedule_axes: Literal["all", "space"] = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.duplicate == "repeat" and (self.layout != "interleaved" or self.alternate):
            raise OptionError(
                "duplicate='repeat' mixes channels 2j and 2j + 1, so it needs layout='interleaved' and "
                f"alternate=False, got layout={self.layout!r} and alternate={self.alternate}. "
                "Use duplicate='interleave'."
            )
        if self.tail == "end" and self.layout != "half":
            raise OptionError(
                f"{self.name}: tail='end' has no effect on pairs of adjacent channels, got layout={self.layout!r}. Use "
                "layout='half'."
            )
        if self.alternate and self.split is not None and len(set(self.split)) > 1:
            raise OptionError(
                f"{self.name}: alternate needs equal numbers of pairs per axis, got split={list(self.split)}. Omit "
                "split."
            )
        self._unrotated = round(self.unrotated * self.pairs)
        check_split(self.name, self.split, self.pairs - self._unrotated)

    @property
    def _channel_multiple(self) -> int:
        if self.schedule_axes == "space":
            return 1  # video models leave the remaining channels unrotated
        if self.tail == "end":  # channels may remain
            return 1 if self.rotated == 1 else 2
        return 4 if self.split is None else 2  # equal numbers of pairs for two axes, unless split is set

    def frequencies(self, pos: Positions) -> list[Tensor]:
        """Return radians per unit of the coordinates, per axis (b or 1, pairs of the axis) float64."""
        counts = pair_counts(self.name, self.split, self.pairs - self._unrotated, pos.axes)
        exact = exact_device(pos.coords)
        # float64, because schedules use powers and ratios of the frequencies
        frequencies = [inverse_frequencies(2 * n, self.temperature, torch.float64) for n in counts]
        if self.rotary_ratio < 1:
            frequencies = [p_rope(f, self.rotary_ratio) for f in frequencies]
        frequencies = [f[None].to(exact) for f in frequencies]
        if self.schedule == "none":
            return frequencies
        now, trained = (t.to(exact, torch.float64) for t in self._sizes(pos))
        cell = pos.cell.to(exact, torch.float64)
        # with schedule_axes='space', the frequencies of frames (axis 0 of 3) are unchanged
        first = int(self.schedule_axes == "space" and pos.axes == 3)
        for i in range(first, pos.axes):
            scale, length = now[:, i] / trained[i], trained[i] * cell[:, i]
            frequencies[i] = grid_frequencies(frequencies[i], self.schedule, scale, length, cell=cell[:, i])
        return frequencies

    def base_too_small(self, grid: Grid) -> BaseTooSmall | None:
        """Return a diagnostic if the base is too small for a side, else None. Axes with few pairs are ignored."""
        with torch.device("cpu"):  # models may be built on the meta device
            pos = grid.positions()
            pos = pos if self.spacing is None else pos.with_spacing(self.spacing)
            freqs, cells = self.frequencies(pos), pos.cell[0].tolist()
            return diagnose_base(self.name, self.temperature, freqs, grid.shape, cells)

    def _angles(self, pos: Positions, layer: int) -> Tensor:
        # the offset is in cells
        coords = pos.coords + self.offset * pos.cell[:, None] if self.offset else pos.coords
        coords = self._augmented(coords, pos.cell, pos, layer)
        # the first pairs belong to the last axis (x) with indexing='xy'
        order = range(pos.axes) if self.indexing == "ij" else range(pos.axes)[::-1]
        freqs = self.frequencies(pos)
        rotated = self._unrotated + sum(f.shape[-1] for f in freqs)
        pairs = rotated if self.tail == "end" else self.pairs
        return axial_angles(coords, freqs, order, pairs, self._unrotated, self.alternate)

    def _tables(self, pos: Positions, layer: int) -> tuple[Tensor, Tensor]:
        if self.duplicate == "interleave":
            return super()._tables(pos, layer)
        angle = self.angles(pos, layer) * pos.spatial[:, None, :, None]
        counts = pair_counts(self.name, self.split, self.pairs - self._unrotated, pos.axes)
        counts = counts if self.indexing == "ij" else counts[::-1]
        rest = self.pairs - self._unrotated - sum(counts)
        parts = angle.split([self._unrotated, *counts, rest], -1)
        # per axis all angles, then all angles again: (..., 2 pairs)
        channels = torch.cat([torch.cat([part, part], -1) for part in parts], -1)
        return channels.cos(), channels.sin()

    def _rotate_by(self, cos: Tensor, sin: Tensor) -> Transform:
        return super()._rotate_by(cos, sin) if self.duplicate == "interleave" else ChannelTables(cos, sin)
