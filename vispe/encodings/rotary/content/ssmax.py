"""Scalable softmax: logits grow with the logarithm of the number of keys (arXiv 2501.19399)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vispe.attention.transform.abstract_transform import Transform
from vispe.attention.transform.affine import Affine
from vispe.encodings.base import Rotary
from vispe.encodings.parts.resample import training_grid
from vispe.encodings.parts.ssmax import Relative, head_factor, log_keys
from vispe.encodings.registry import register
from vispe.grid import Positions
from vispe.utils.options import PositiveFloat, PositiveInt


@register
class Ssmax(Rotary):
    """Scales logits by the logarithm of the number of keys, so that attention has the same sharpness for any length.

    logits[h, i, j] = s_h ln(n_i) q_i . k_j / sqrt(d_h), n_i keys of query i          arXiv 2501.19399

    Without position information: a factor on queries, for sums such as ``ssmax+rope_axial`` or ``ssmax+alibi2d``, whose
    bias it does not scale. ``ssmax.retrofit`` divides by the logarithm of the number of tokens at training, so that a
    pretrained model is unchanged there; bare ``ssmax`` makes its logits about five times as large.

    Args:
        num_heads: heads, h.
        init: initial s_h.
        causal: count the keys up to the token itself, for a causal softmax; else all tokens of the sample. Padding of
            packed patches does not count; that of other batches does.
        normalize: 'reference' divides ln(n_i) by that of the reference grid with its prefix tokens, 'none' does not.
        reference: shape for normalize='reference'; the grid that the host was built with by default.

    Presets: ``ssmax.retrofit``.

    Shapes: pos (n, axes) -> a factor of queries (1 or b, h, 1 or n, 1), prefix tokens included: they have as many keys.
    New resolution: its purpose.   Cost: h parameters per layer, one product per query channel.
    Invariant to: all changes of positions; it only counts tokens.
    Raises: OptionError for normalize='reference' if the reference grid is unknown.
    Differs from the reference: one factor per image in the two-sided form; `normalize`.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("ssmax", num_heads=2)
        >>> encoding.transform(Grid((2, 3)).positions(), 0).query(torch.ones(1, 2, 6, 1))[0, :, 0, 0]
        tensor([1.7918, 1.7918], grad_fn=<SelectBackward0>)
    """

    name = "ssmax"
    paper = "Scalable-Softmax Is Superior for Attention, https://arxiv.org/abs/2501.19399"
    year = 2025
    ndim = (1, 2, 3)
    presets: ClassVar[dict[str, dict[str, Any]]] = {"retrofit": {"normalize": "reference"}}
    scales_channels = True
    invariant = ("translation", "quarter_turns", "reflection", "rotation")
    formula = r"a_{hij} = s_h \ln n_i \, \frac{q_i \cdot k_j}{\sqrt{d_h}}"
    tested_options = ("causal=true,init=0.3", "normalize=reference,reference=[5,7]")
    preset_invariant: ClassVar[dict[str, tuple[str, ...]]] = {
        "retrofit": ("translation", "quarter_turns", "reflection")
    }

    num_heads: PositiveInt
    init: PositiveFloat = 1.0
    causal: bool = False
    normalize: Relative = "none"
    reference: tuple[PositiveInt, ...] | None = None

    def __post_init__(self) -> None:
        axes = len(self.reference or ())
        training_grid(self.reference, axes, self.normalize == "reference", f"normalize={self.normalize!r}")
        if axes:
            self._accept(axes)
        self.seq_scale = nn.Parameter(torch.empty(self.num_heads))
        self.reset_parameters()

    @property
    def per_layer(self) -> bool:
        """True: every layer has its own scales."""
        return True

    def reset_parameters(self) -> None:
        """Set all scales to `init`."""
        nn.init.constant_(self.seq_scale, self.init)

    def transform(self, pos: Positions, layer: int, x: Tensor | None = None) -> Transform:
        """Return the scaling of queries."""
        self._need_axes(pos)
        logs = log_keys(pos, self.causal, self.normalize, self.reference)
        # a factor of the query scales its logits, but not a bias that is added later
        return Affine(q_mul=head_factor(self.seq_scale, logs))
