"""Mixed RoPE: every pair of channels turns with a learned direction of the grid (arXiv 2403.13298)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from vispe.encodings.parts.rotary.rope.mixed_rope import MixedRope
from vispe.encodings.registry import register
from vispe.errors import OptionError, ShapeError, counted
from vispe.grid.frequencies import inverse_frequencies
from vispe.utils.options import Axes, PositiveFloat


@register
class RopeMixed(MixedRope):
    """Queries and keys turn with the coordinates of their patch along learned directions, per block and head.

    Pair i of head n turns by x * F[0, n, i] + y * F[1, n, i]          arXiv 2403.13298

    Bare ``rope_mixed``, also called ``rope_mixed.ropevit``, has the settings of the released rope-vit models.
    The frequencies F start in a random frame of each head, as many pairs along each axis of it.

    Args:
        dim: width of the tokens, d.
        num_heads: heads, h.
        head_dim: channels of a head, d_h; dim / num_heads by default.
        depth: blocks of the model, for `per_block`.
        axes: axes of the grids that it is for; frequencies are (axes, h, pairs), last axis (x) first.
        temperature: ratio of the longest to the shortest wavelength at the start; the shortest is 2 pi units of
            the spacing.
        rotate: whether the frames of the heads start at random; else along the axes.
        trainable: whether the frequencies learn; they are saved either way.
        layout: which channels are a pair: 'interleaved' 2c and 2c + 1, 'half' c and c + pairs. A checkpoint
            works only with its own.
        rotated: fraction of the head channels that are rotated; the others carry content only.
        spacing: distance between neighbouring patches per axis, instead of `Grid.spacing`.
        schedule: what happens at another resolution, per axis: 'none' goes on with the patch numbers, 'rescale'
            maps them onto the training grid, 'align_corners' maps the first and last patch onto those of the training
            grid, 'pi' rescales larger grids only, 'yarn' stretches only pairs of less
            than one turn in the training grid. ('ntk' is for frequencies in order.)
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

    Shapes: pos.coords (1 or b, n, axes) -> tables (1 or b, h, n, pairs) float32; prefix tokens are not rotated.
    New resolution: see `schedule`.   Cost: axes * d / 2 parameters per block, O(n d) per block.
    Invariant to: translation in scores between patches (not of prefix tokens with patches); norms are preserved
        (logit_scale=none, basis=none).
    Raises: ShapeError if `pos` has other axes, or the training grid is needed and unknown; OptionError for
        options that do not fit together.
    Differs from the reference: one parameter per block (`freqs` of the released models, one for all blocks, is
        split on loading); tables are computed for each grid (rope-vit reuses them whenever the number of tokens
        agrees); angles are float32 also under autocast.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("rope_mixed", dim=16, num_heads=2)
        >>> encoding.transform(Grid((2, 3)).positions(), 0).query(torch.ones(1, 2, 6, 8)).shape
        torch.Size([1, 2, 6, 8])
    """

    name = "rope_mixed"
    paper = "Rotary Position Embedding for Vision Transformer, https://arxiv.org/abs/2403.13298"
    year = 2024
    ndim = (1, 2, 3)
    encodes = ("distance", "direction")
    invariant = ("translation",)
    formula = r"\theta_{ni}(p) = x F^x_{ni} + y F^y_{ni}, \quad q'_i = e^{i \theta_{ni}(p)} q_i"
    tested_options = (
        "temperature=50,rotate=false",
        "layout=half",
        "rotated=0.5",
        "spacing=[5,0.7]",
        "schedule=rescale,reference=[5,7]",
        "schedule=yarn,reference=[2,2]",
        "shift_coords=0.5,jitter_coords=1.3,rescale_coords=2",
        "axes=1",
        "axes=3",
        "logit_scale=ssmax",
        "layout=half,basis=head",
    )
    presets: ClassVar[dict[str, dict[str, Any]]] = {"ropevit": {"temperature": 10.0}}

    axes: Axes = 2
    temperature: PositiveFloat = 10.0
    rotate: bool = True
    trainable: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pairs < self.axes:
            raise OptionError(
                f"rope_mixed needs a pair of channels per axis, got {counted(self.pairs, 'pair')} for axes={self.axes}."
            )
        self._accept(self.axes)
        freqs = torch.empty(self.axes, self.num_heads, self.pairs)
        self.freqs = nn.Parameter(freqs) if self.trainable else nn.Buffer(freqs)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw a random frame per head; magnitudes are ``temperature ** (-j / J)`` along each of its axes."""
        super().reset_parameters()
        heads, like = self.num_heads, self.freqs
        # same order of draws as timm and the reference, for equal results with equal seeds
        if self.axes == 2:
            from timm.layers import pos_embed_sincos  # local import: `import vispe` must not import timm

            draw = cast("Callable[..., Tensor]", pos_embed_sincos.init_random_2d_freqs)
            # (2, depth 1, h, pairs) -> (2, h, pairs)
            frequencies = draw(4 * (self.pairs // 2), 1, heads, self.temperature, self.rotate)[:, 0]
        else:
            frame = torch.eye(self.axes).expand(heads, -1, -1)
            if self.rotate:
                frame = _frames(heads, self.axes)
            counts = [len(part) for part in torch.arange(self.pairs).tensor_split(self.axes)]
            sizes = [inverse_frequencies(2 * n, self.temperature) for n in counts]
            parts = [frame[:, :, i, None] * size for i, size in enumerate(sizes)]  # (h, a, J)
            # (h, axes, pairs) -> (axes, h, pairs), as in the checkpoints of rope-vit
            frequencies = torch.cat(parts, -1).transpose(0, 1)
        with torch.no_grad():
            like.copy_(frequencies)

    def rename_checkpoint_keys(self, state_dict: dict[str, Any], parent_prefix: str, prefix: str) -> None:
        """Split `freqs` (2, depth, h * pairs) of rope-vit, or `rope.freqs` of timm, into the parameter of this block.

        The last block removes them, and the coordinates that rope-vit stores.
        """
        match = re.fullmatch(r"(.*?)blocks\.(\d+)\.(?:attn\.)?", parent_prefix)
        if match is None:
            return
        root, block = match[1], int(match[2])
        for name in (f"{root}freqs", f"{root}rope.freqs"):
            if name not in state_dict:
                continue
            saved = state_dict[name]
            depth = saved.shape[1]
            if saved.shape[0] != self.axes or saved[:, 0].numel() != self.freqs.numel() or block >= depth:
                raise ShapeError(
                    f"{name} has shape {tuple(saved.shape)}, but block {block} needs "
                    f"({self.axes}, above {block}, {self.num_heads} * {self.pairs}). Build the model of the checkpoint."
                )
            state_dict[f"{prefix}freqs"] = saved[:, block].reshape(self.freqs.shape)
            # removed only after the last block has read its part
            if block == depth - 1:
                for done in (name, f"{root}freqs_t_x", f"{root}freqs_t_y"):
                    state_dict.pop(done, None)

    def frequencies(self) -> Tensor:
        """Return the learned frequencies (axes, h, pairs), last axis (x) first, in radians per patch."""
        return self.freqs


def _frames(heads: int, axes: int) -> Tensor:
    """Return random orthonormal frames (h, axes, axes), evenly distributed."""
    frequencies = torch.randn(heads, axes, axes)
    frame, upper = cast("tuple[Tensor, Tensor]", torch.linalg.qr(frequencies))  # pyright: ignore[reportUnknownMemberType]
    # QR is unique up to signs: with a positive diagonal of R, frames are evenly distributed
    return frame * upper.diagonal(dim1=-2, dim2=-1).sign()[:, None]
