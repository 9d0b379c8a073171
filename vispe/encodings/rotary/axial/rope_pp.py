"""RoPE++: heads that use the imaginary part of the complex product whose real part RoPE uses (arXiv 2512.07525)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from vispe.attention.transform.pairs import PairRotation
from vispe.encodings.parts.rotary.angles import AxialRotary
from vispe.encodings.parts.rotary.rope.axial_pairs import even_counts
from vispe.encodings.registry import register
from vispe.grid import Positions

Mode = Literal["imagh", "imago", "imag1", "none"]


@register
class RopePp(AxialRotary):
    """Some heads score by the imaginary part of the product of rotated queries and keys, which is odd in their offset.

    real: score = Re sum_c z_q conj(z_k), imaginary: score = Im sum_c z_q conj(z_k)          arXiv 2512.07525

    with z_q, z_k the pairs of channels as complex numbers, rotated as in RoPE; an imaginary head rotates its
    queries by 90 degrees less and its keys as usual. With equal queries and keys its score is odd in their offset.
    ``rope_pp.text`` has the base of language models. Imaginary heads of a pretrained model change.

    With shared projections, EH and EC, RoPE++ computes a real and an imaginary head from each query: use twice the
    heads with ``mode=imag1`` and pass ``q.repeat_interleave(2, 1)`` to `vispe.attention` with ``enable_gqa=True``.

    Args:
        dim: width of the tokens, d.
        num_heads: heads of queries, h.
        head_dim: channels of a head, d_h; dim / num_heads by default.
        mode: which heads are imaginary: 'imagh' those after the first h / 2, 'imago' all, 'imag1' every second,
            'none' none: plain RoPE.
        rotated_pairs: pairs that an imaginary head rotates by 90 degrees: 'all', or those of one 'axis', with the axes
            assigned to heads cyclically, the last (x) first: the others compare positions along the other axes.
        base: ratio of the first to the (C + 1)-th frequency of an axis; the first is 1 per unit of the
            spacing.
        layout: which channels are a pair: 'half' c and c + pairs, 'interleaved' 2c and 2c + 1.
        spacing: distance between neighbouring patches per axis, instead of `Grid.spacing`.

    Shapes: pos (n, axes) -> tables of queries (1 or b, h, n, pairs), of keys (1 or b, 1, n, pairs); prefix tokens are
        not rotated, also in imaginary heads.
    New resolution: coordinates are extrapolated.   Cost: no parameters; as RoPE.
    Invariant to: translation in scores between patches (not of prefix tokens with patches); norms are preserved.
    Raises: ShapeError if a head has fewer pairs than `pos` has axes; OptionError for incompatible options.
    Differs from the reference: the reference has one axis and base 10000, and changes queries in place; axes and
        `rotated_pairs` are ours. Query heads with shared projections are up to the caller.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("rope_pp", dim=16, num_heads=2)
        >>> encoding.transform(Grid((2, 3)).positions(), 0).query(torch.ones(1, 2, 6, 8)).shape
        torch.Size([1, 2, 6, 8])
    """

    name = "rope_pp"
    paper = (
        "Beyond Real: Imaginary Extension of Rotary Position Embeddings for Long-Context LLMs, "
        "https://arxiv.org/abs/2512.07525"
    )
    year = 2025
    presets: ClassVar[dict[str, dict[str, Any]]] = {"text": {"base": 10000.0}}
    encodes = ("distance", "direction")
    invariant = ("translation",)
    formula = (
        r"a = \operatorname{Re} \sum_c z^q_c \overline{z^k_c} \quad \text{or} \quad a = \operatorname{Im} "
        r"\sum_c z^q_c \overline{z^k_c}"
    )
    tested_options = (
        "mode=imago,layout=interleaved",
        "mode=imag1,rotated_pairs=axis",
        "mode=none,spacing=[2,0.5]",
    )

    mode: Mode = "imagh"
    rotated_pairs: Literal["all", "axis"] = "all"

    def imaginary(self) -> list[bool]:
        """Return which heads are imaginary."""
        heads, first = range(self.num_heads), {"imagh": self.num_heads // 2, "imago": 0}
        if self.mode in first:
            return [h >= first[self.mode] for h in heads]
        return [self.mode == "imag1" and h % 2 == 1 for h in heads]

    def transform(self, pos: Positions, layer: int, x: Tensor | None = None) -> PairRotation:
        """Return the rotation; the identity for prefix tokens."""
        self._need_axes(pos)
        return pos.remember((self.name, self.config_key), lambda: self._rotation(pos))

    def _rotation(self, pos: Positions) -> PairRotation:
        angle = self.angles(pos)
        cos, sin = angle.cos(), angle.sin()
        if self.mode == "none":
            return PairRotation(cos, sin, self.layout)
        # by 90 degrees less, exactly, without rounding of pi / 2
        imaginary = self._imaginary_pairs(pos.axes, angle.device) & pos.spatial[:, None, :, None]
        keys = cos, sin
        # cos(a - pi / 2) = sin(a) and sin(a - pi / 2) = -cos(a); keys are rotated as usual
        return PairRotation(
            torch.where(imaginary, sin, cos), torch.where(imaginary, -cos, sin), self.layout, keys=keys
        )

    def _imaginary_pairs(self, axes: int, device: torch.device) -> Tensor:
        """Return the mask of pairs that are rotated by 90 degrees, (1, h, 1, pairs)."""
        # the last axis (x) has the first pairs and index 0
        counts = even_counts(self.pairs, axes)[::-1]
        axis = torch.tensor([a for a, n in enumerate(counts) for _ in range(n)], device=device)
        imaginary = torch.tensor(self.imaginary(), device=device)[:, None]
        if self.rotated_pairs == "all":
            return imaginary.expand(-1, self.pairs)[None, :, None]
        # the first imaginary head has the first axis
        order = (imaginary.cumsum(0) - 1) % axes
        return (imaginary & (axis == order))[None, :, None]
