"""TRA: threshold relative attention: keys below a threshold are removed, others decay with their rank (2503.23174)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.dense_request import DenseRequest
from vispe.attention.precision import at_least_float32, exact_product
from vispe.encodings.base import Biased
from vispe.encodings.parts.bias.nearer_key_count import HIDDEN_PAIRS, count_nearer
from vispe.encodings.parts.layers import PreciseLinear
from vispe.encodings.registry import register
from vispe.errors import OptionError, ShapeError, counted
from vispe.grid import Positions
from vispe.utils.options import FiniteFloat, PositiveFloat, PositiveInt, Spacing


class ThresholdBias(Bias):
    """The full logits: ``S_ij + decay_i * (retained keys at most as far as j)``, and -inf where S is 0.

    Args:
        decay: (b, h, n), 0 or less.
        pos: positions of the tokens.
        order: positions that define the distance of keys.
        causal: whether only keys up to the query count.
        eps: added to mean squares.
    """

    __slots__ = ("causal", "decay", "eps", "hidden", "order")

    def __init__(self, decay: Tensor, pos: Positions, order: Positions, causal: bool, eps: float) -> None:
        super().__init__(pos)
        self.decay, self.order, self.causal, self.eps = decay, order, causal, eps
        self.hidden: Tensor | None = pos.attrs.get(HIDDEN_PAIRS)
        self.replaces_product = True

    @property
    def per_sample(self) -> bool:
        """True: the bias depends on content."""
        return True

    def _dense(self, request: DenseRequest) -> Tensor:
        if request.q is None or request.k is None or request.scale is None:
            raise ShapeError(
                "tra computes logits from queries and keys and needs q, k and scale, got None for one of them. Pass "
                "q, k and scale to dense()."
            )
        q, k = (self._unit(request.pick(x, 1)) for x in (request.q, request.k))
        # pairs with a score of 0 are removed below
        score = (exact_product(q, k.transpose(-1, -2)) * request.scale).relu()
        retained = score > 0
        # later keys must not be counted as retained
        if self.causal:
            retained = retained & ~self._later()
        # the constant of a library, such as -100, would retain hidden keys where no other key remains
        if self.hidden is not None:
            retained = retained & ~self.hidden[:, None]
        count, valid = count_nearer(retained.to(score.dtype), self.order, self.causal, self.hidden)
        # (b, h, n, 1) * (b, h, n, m) -> (b, h, n, m)
        decay = request.pick(self.decay, 1)[..., None] * count
        # pairs with a prefix token have no decay, but are removed by their score as well
        return (score + decay.where(valid, 0.0)).masked_fill(~retained, float("-inf"))

    def _unit(self, x: Tensor) -> Tensor:
        """Return heads divided by their root mean square."""
        wide = at_least_float32(x)
        return wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()

    def _later(self) -> Tensor:
        """Return the mask of keys later than their query, (b or 1, 1, n, n)."""
        coord, spatial = self.order.coords[..., 0], self.order.spatial
        # of shape (b or 1, queries, keys)
        later = coord[:, :, None] < coord[:, None]
        return (later & spatial[:, :, None] & spatial[:, None])[:, None]


@register
class Tra(Biased):
    """Removes keys with a non-positive score; the others decay with the number of nearer retained keys.

    logits[h, i, j] = S_ij + log sigmoid(w_h . x_i + c_h) * (retained keys no farther from i than j)        arXiv
    2503.23174

    S = relu(q_i . k_j / sqrt(d_h)) of queries and keys with root mean square 1; a key with S = 0 is removed. These are
    the full logits: the usual product of queries and keys is not added. A query without retained keys returns 0.
    The threshold is a step, so rounding can add or remove a key: float16 models differ from float32 by 5 to 20 % on
    some inputs, bfloat16 ones by about 1 %.

    Args:
        dim: width of the tokens, d.
        num_heads: heads, h.
        causal: one axis, looking back: retained keys j <= m <= i count, and later keys are removed; as in the notebook.
        gate_bias: initial c; with 5, a retained key costs 0.007.
        eps: added to the mean squares.
        spacing: distance between neighbouring patches per axis, instead of `Grid.spacing`.

    Shapes: pos (n, axes), x (b, n, d) -> logits (b, h, n, n). Prefix tokens are retained or removed by S like others,
        but do not decay and do not count.
    New resolution: no resampling needed; larger grids have larger counts. Dropped patches do not count.
    Cost: h (d + 1) parameters per layer; keys are sorted once per grid; logits are computed densely for every image.
    Invariant to: translation, rotation by any angle and reflection, when patches keep their content.
    Raises: ShapeError without the tokens x, or for causal=True on a grid of several axes.
    Differs from the reference: the order of keys on grids; c starts at `gate_bias`. A pretrained model changes
        at first, because keys are removed.

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
    formula = (
        r"a_{hij} = S_{ij} + \ln \sigma (w_h \cdot x_i + c_h) \, n_{ij}, \quad S_{ij} = "
        r"\operatorname{relu} \frac{q_i \cdot k_j}{\sqrt{d_h}}"
    )
    tested_options = ("gate_bias=-1,eps=0.1", "causal=true", "spacing=[2,0.5]")
    ndim = (1, 2, 3)
    encodes: ClassVar[tuple[str, ...]] = ("distance", "content")
    invariant: ClassVar[tuple[str, ...]] = ("translation", "quarter_turns", "reflection", "rotation")
    reads_tokens = True
    counts_keys = True

    dim: PositiveInt
    num_heads: PositiveInt
    causal: bool = False
    gate_bias: FiniteFloat = 5.0
    eps: PositiveFloat = 1e-6
    spacing: Spacing | None = None

    def __post_init__(self) -> None:
        if self.causal and self.spacing is not None:
            raise OptionError(
                "tra: spacing has no effect with causal=True, which counts along one axis, got "
                f"spacing={list(self.spacing)}. Omit it."
            )
        if self.causal or self.spacing is not None:
            self._accept(1 if self.spacing is None else len(self.spacing))
        self.delta_proj = PreciseLinear(self.dim, self.num_heads)
        self.reset_parameters()

    @property
    def per_layer(self) -> bool:
        """True: every layer has its own gates."""
        return True

    def reset_parameters(self) -> None:
        """Initialise the gate projection as torch does; its bias is `gate_bias`."""
        self.delta_proj.reset_parameters()
        nn.init.constant_(self.delta_proj.bias, self.gate_bias)

    def bias(self, pos: Positions, layer: int, x: Tensor | None = None) -> Bias | None:
        """Return the logits, as a bias that replaces the product, for the tokens `x` (b, n, d)."""
        if self.causal and pos.axes != 1:
            raise ShapeError(f"tra needs 1 axis with causal=True, got {counted(pos.axes, 'axis')} ({pos}).")
        self._need_axes(pos)
        if x is None:
            raise ShapeError("tra reads the tokens. Pass x (b, n, d) to bias().")
        # (b, n, h) -> (b, h, n)
        decay = F.logsigmoid(self.delta_proj(x)).transpose(1, 2)
        order = pos if self.spacing is None else pos.with_spacing(self.spacing)
        return ThresholdBias(decay, pos, order, self.causal, self.eps)
