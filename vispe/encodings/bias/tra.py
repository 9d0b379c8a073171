"""TRA: a rectified threshold keeps keys, and kept keys in between make others fade, in place of the usual logits."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from vispe.attention.bias.abstract_bias import Bias, Request
from vispe.attention.precision import at_least_float32, exact_product
from vispe.encodings.base import Biased
from vispe.encodings.parts.layers import PreciseLinear
from vispe.encodings.parts.nearer_key_count import count_nearer
from vispe.encodings.registry import register
from vispe.errors import OptionError, ShapeError
from vispe.grid import Positions
from vispe.options import Number, Positive, Spacing, Whole


class KeptBias(Bias):
    """The whole logits: ``S_ij + decay_i * (kept keys as near as j, or nearer)``, and -inf where S is 0.

    Args:
        decay: (b, h, n), 0 or less.
        pos: the positions it is bound to.
        order: the positions by which keys are nearer or farther.
        causal: whether only what is before a query counts.
        eps: added to mean squares.
    """

    __slots__ = ("causal", "decay", "eps", "order")

    def __init__(self, decay: Tensor, pos: Positions, order: Positions, causal: bool, eps: float) -> None:
        super().__init__(pos)
        self.decay, self.order, self.causal, self.eps = decay, order, causal, eps
        self.whole = True

    @property
    def per_sample(self) -> bool:
        """Whether samples of a batch differ."""
        return True

    def _dense(self, ask: Request) -> Tensor:
        if ask.q is None or ask.k is None or ask.scale is None:
            raise ShapeError("tra makes the logits of queries and keys; pass q, k and scale to dense().")
        q, k = (self._unit(ask.pick(x, 1)) for x in (ask.q, ask.k))
        score = (exact_product(q, k.transpose(-1, -2)) * ask.scale).relu()
        kept = score > 0
        if self.causal:
            kept = kept & ~self._later()
        count, seen = count_nearer(kept.to(score.dtype), self.order, self.causal)
        fade = ask.pick(self.decay, 1)[..., None] * count
        return (score + fade.where(seen, 0.0)).masked_fill(~kept, float("-inf"))

    def _unit(self, x: Tensor) -> Tensor:
        """Return heads divided by their root mean square."""
        wide = at_least_float32(x)
        return wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()

    def _later(self) -> Tensor:
        """Return which keys are later than their query, (b or 1, 1, n, n)."""
        place, spatial = self.order.coords[..., 0], self.order.spatial
        later = place[:, :, None] < place[:, None]
        return (later & spatial[:, :, None] & spatial[:, None])[:, None]


@register
class Tra(Biased):
    """Keeps the keys that a query agrees with and lets them fade with the number of kept keys that are nearer.

    logits[h, i, j] = S_ij + log sigmoid(w_h . x_i + c_h) * (kept keys no farther from i than j)        arXiv 2503.23174

    S = relu(q_i . k_j / sqrt(d_h)) of queries and keys of root mean square 1; a key with S = 0 is removed. These are
    the whole logits: the product of queries and keys as they are is not added. A query that keeps no key returns 0.
    The threshold is a step, so rounding can keep or drop a key: float16 models differ from float32 by 5 to 20 % on some
    inputs, bfloat16 ones by about 1 %.

    Args:
        dim: width of the tokens, d.
        num_heads: heads, h.
        causal: one axis, looking back: kept keys j <= m <= i count, and what is later is removed; as in the notebook.
        gate_bias: start of c; with 5 a kept key costs 0.007.
        eps: added to the mean squares.
        spacing: distance between neighbouring patches per axis, in place of `Grid.spacing`.

    Shapes: pos (n, axes), x (b, n, d) -> logits (b, h, n, n). Prefix tokens are kept or removed by S as others are, but
        do not fade and do not count.
    New resolution: no resampling needed; larger grids have larger counts. Dropped patches do not count.
    Cost: h (d + 1) parameters per layer; keys are sorted once per grid; logits are made dense for every image.
    Invariant to: translation, rotation by any angle and reflection, when patches keep their content.
    Raises: ShapeError without the tokens x, or for causal=True on a grid of several axes.
    Differs from the reference: the order of keys on grids; c starts at `gate_bias`. A pretrained model does not start
        as it was, because keys are removed from the start.

    Example:
        >>> import torch
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("tra", dim=16, num_heads=2)
        >>> bias = encoding.bias(Grid((2, 3)).positions(), 0, torch.ones(1, 6, 16))
        >>> q = torch.ones(1, 2, 6, 8)
        >>> bias.dense(q=q, k=q, scale=0.5).shape
        torch.Size([1, 2, 6, 6])
    """

    name = "tra"
    paper = "TRA: Better Length Generalisation with Threshold Relative Attention, https://arxiv.org/abs/2503.23174"
    year = 2025
    ndim = (1, 2, 3)
    knows: ClassVar[tuple[str, ...]] = ("distance", "content")
    invariant: ClassVar[tuple[str, ...]] = ("translation", "quarter_turns", "reflection", "rotation")
    reads_tokens = True

    dim: Whole
    num_heads: Whole
    causal: bool = False
    gate_bias: Number = 5.0
    eps: Positive = 1e-6
    spacing: Spacing | None = None

    def __post_init__(self) -> None:
        if self.causal and self.spacing is not None:
            raise OptionError("tra: causal=True counts along one axis, where spacing does nothing.")
        if self.causal or self.spacing is not None:
            self._accept(1 if self.spacing is None else len(self.spacing))
        self.delta_proj = PreciseLinear(self.dim, self.num_heads)
        self.reset_parameters()

    @property
    def per_layer(self) -> bool:
        """Every layer has gates of its own."""
        return True

    def reset_parameters(self) -> None:
        """Draw the weight of the gates as torch does; their bias is `gate_bias`."""
        self.delta_proj.reset_parameters()
        nn.init.constant_(self.delta_proj.bias, self.gate_bias)

    def bias(self, pos: Positions, layer: int, x: Tensor | None = None) -> Bias | None:
        """Return the logits, as a bias in place of the product, for the tokens `x` (b, n, d)."""
        if self.causal and pos.axes != 1:
            raise ShapeError(f"tra needs 1 axis with causal=True, got {pos.axes} axes ({pos}).")
        self._need_axes(pos)
        if x is None:
            raise ShapeError("tra reads the tokens; pass x (b, n, d) to bias().")
        decay = F.logsigmoid(self.delta_proj(x)).transpose(1, 2)
        order = pos if self.spacing is None else pos.spaced(self.spacing)
        return KeptBias(decay, pos, order, self.causal, self.eps)
