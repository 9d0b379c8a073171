"""Selective RoPE: content-dependent rotation angles of queries and keys (arXiv 2511.17388)."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vispe.attention.precision import at_least_float32, exact_product
from vispe.encodings.parts.layers import PreciseLinear
from vispe.encodings.parts.rotary.context import ContextRotary, heads_of, unit_heads
from vispe.encodings.registry import register
from vispe.errors import OptionError
from vispe.grid import Positions
from vispe.grid.frequencies import inverse_frequencies
from vispe.utils.options import PositiveEvenInt, PositiveFloat, PositiveInt


@register
class SelectiveRope(ContextRotary):
    """Rotates queries and keys by content-dependent angles: summed along a sequence, or added to the angles of a grid.

    scan:  angle_t = temperature * sum over s <= t of phi_s, phi = filter(W x~)          arXiv 2511.17388
    field: angle = w . p + pi tanh(W x~)          on grids, ours

    x~ are the tokens, L2-normalised per head. The filter covers the last `kernel_size` tokens. The
    field displaces the position of each token by its content, by at most pi; it starts at 0: as RoPE.

    Args:
        dim: width of the tokens, d.
        num_heads: heads, h.
        head_dim: channels of a head, d_h; dim / num_heads by default.
        form: 'field' on 1 to 3 axes, or 'scan' along one, as the reference, where attention usually is causal.
        projection: W: 'low' of rank `rank` from all channels, or 'full' from those of the head, with unit columns
            and a factor per head ('scan') or free ('field').
        rank: rank of W with projection='low'.
        filter: of a scan: 'learned' taps of the last `kernel_size` tokens, or the 'difference' of the last two.
        kernel_size: number of taps, for a scan with filter='learned'.
        gate: of a scan: whether sigmoid(V x~ + c) of each head multiplies phi.
        drift: of a scan: whether exp(bias) is added to phi, initially 1 per token: angles then grow as in RoPE.
        eps: added to the squared length of x~.
        base: ratio of the first to the (C + 1)-th frequency of an axis, or temperature.
        layout: which channels are a pair: 'half' c and c + pairs, 'interleaved' 2c and 2c + 1.
        spacing: distance between neighbouring patches per axis, instead of `Grid.spacing`; of a field.

    Presets: ``selective_rope.scan`` is the scan with the base of the reference, 500000.

    Shapes: pos (n, axes), x (b, n, d) -> tables (b, h, n, pairs); prefix tokens are neither rotated nor part of a scan.
    New resolution: a field is extrapolated as RoPE, a scan by its sums.   Cost: rank (d + h pairs) parameters per
        layer, with projection='full' d pairs; as many products per token, and tables for every image.
    Invariant to: translation in scores between patches, each with its content (a field); norms are preserved.
    Raises: ShapeError without the tokens x, or for a scan of other numbers of axes than 1 or of dropped tokens;
        OptionError for incompatible options.
    Differs from the reference: fields are ours; norms of queries and keys are applied before the rotation, in the
        reference after it; only its first rule for the temperature, with a highest one of 1.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("selective_rope", dim=16, num_heads=2)
        >>> turn = encoding.transform(Grid((2, 3)).positions(), 0, torch.ones(1, 6, 16))
        >>> turn.query(torch.ones(1, 2, 6, 8)).shape
        torch.Size([1, 2, 6, 8])
    """

    name = "selective_rope"
    paper = "Selective Rotary Position Embedding, https://arxiv.org/abs/2511.17388"
    year = 2025
    presets: ClassVar[dict[str, dict[str, Any]]] = {"scan": {"form": "scan", "base": 500000.0}}
    encodes = ("distance", "direction", "content")
    invariant = ("translation",)
    formula = r"\theta_t = \tau \sum_{s \le t} \varphi_s, \quad \varphi = \operatorname{filter}(W \tilde{x})"
    tested_options = (
        "projection=full,layout=interleaved",
        "spacing=[2,0.5],rank=3",
        "form=scan,gate=true,drift=true",
        "form=scan,projection=full,filter=difference",
    )
    # sums depend on all previous tokens
    preset_invariant: ClassVar[dict[str, tuple[str, ...]]] = {"scan": ()}

    head_dim: PositiveEvenInt | None = None
    projection: Literal["low", "full"] = "low"
    rank: PositiveInt = 16
    filter: Literal["learned", "difference"] = "learned"
    kernel_size: PositiveInt = 4
    gate: bool = False
    drift: bool = False
    eps: PositiveFloat = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        heads, scan, full = self.num_heads, self.form == "scan", self.projection == "full"
        if not scan and (self.filter != "learned" or self.gate or self.drift):
            raise OptionError(
                "filter, gate and drift have no effect with form='field'. Omit them, or use form='scan'."
            )
        if full and self.rank != 16:
            raise OptionError(f"rank={self.rank} has no effect with projection='full'. Omit it.")
        self.down = None if full else PreciseLinear(self.dim, self.rank, bias=False)
        self.up = None if full else PreciseLinear(self.rank, heads * self.pairs, bias=False)
        self.weight = nn.Parameter(torch.empty(heads, self._token_part(), self.pairs)) if full else None
        self.scalar = nn.Parameter(torch.empty(heads)) if full and scan else None
        self.temperature = nn.Parameter(torch.empty(self.pairs)) if scan else None
        learned = scan and self.filter == "learned"
        if not learned and self.kernel_size != 4:
            raise OptionError(
                f"selective_rope: kernel_size needs form='scan' and filter='learned', got "
                f"kernel_size={self.kernel_size}. Omit it, or use them."
            )
        self.taps = nn.Parameter(torch.empty(heads * self.pairs, self.kernel_size)) if learned else None
        self.drift_log = nn.Parameter(torch.empty(heads, self.pairs)) if self.drift else None
        self.gate_proj = PreciseLinear(self.dim, heads) if self.gate else None
        self.reset_parameters()

    def _pair_count(self) -> int:
        self._token_part()  # also checked: tokens are split into heads
        return super()._pair_count()

    def reset_parameters(self) -> None:
        """Initialise the projections as torch does; the last projection of a field starts at 0."""
        for linear in (self.down, self.up, self.gate_proj):
            if linear is not None:
                linear.reset_parameters()
        last = self.weight if self.up is None else self.up.weight
        with torch.no_grad():
            if self.weight is not None:
                # (h, d / h, pairs): variance 1 / fan-in
                self.weight.normal_(std=self.weight.shape[1] ** -0.5)
            if self.form == "field" and last is not None:
                last.zero_()
            if self.scalar is not None:
                self.scalar.fill_(1)
            if self.temperature is not None:
                # factors of the sums start at the frequencies of RoPE
                freqs = inverse_frequencies(2 * self.pairs, self.base, torch.float64)
                self.temperature.copy_(freqs)
            if self.taps is not None:
                bound = self.kernel_size**-0.5
                self.taps.uniform_(-bound, bound)
            if self.drift_log is not None:
                self.drift_log.zero_()

    def _phases(self, unit: Tensor) -> Tensor:
        """Return W x~ (b, h, n, pairs) of the parts of heads (b, h, n, d / h)."""
        if self.weight is None:
            assert self.down is not None
            assert self.up is not None
            # (b, h, n, d / h) -> (b, n, d)
            joined = unit.transpose(1, 2).flatten(2)
            return heads_of(self.up(self.down(joined)), self.num_heads)
        weight = at_least_float32(self.weight)
        if self.scalar is not None:
            # unit vectors over the input channels, times a scalar per head
            weight = F.normalize(weight, dim=1) * self.scalar[:, None, None]
        return exact_product(unit, weight)

    def _field(self, x: Tensor, pos: Positions) -> Tensor:
        return math.pi * torch.tanh(self._phases(unit_heads(x, self.num_heads, self.eps)))

    def _steps(self, x: Tensor, spatial: Tensor) -> Tensor:
        unit = unit_heads(x, self.num_heads, self.eps)
        phi = self._phases(unit) * spatial  # tokens without a position at the start act as zero padding
        size = self.kernel_size
        # taps from the oldest to the newest token; the fixed ones are phi_t - phi_(t-1)
        taps = phi.new_tensor([0.0, 0.0, -1.0, 1.0]) if self.taps is None else at_least_float32(self.taps)
        shifted = F.pad(phi, (0, 0, size - 1, 0)).unfold(2, size, 1)  # (b, h, n, pairs, taps)
        phi = (shifted * taps.reshape(-1, 1, self.pairs if self.taps is not None else 1, size)).sum(-1)
        if self.drift_log is not None:
            phi = phi + at_least_float32(self.drift_log).exp()[:, None]
        if self.gate_proj is not None:
            opened = torch.sigmoid(self.gate_proj(unit.transpose(1, 2).flatten(2)))
            # (b, n, h) -> (b, h, n, 1)
            phi = phi * opened.transpose(1, 2)[..., None]
        return phi

    def _rates(self) -> Tensor | float:
        return 1.0 if self.temperature is None else at_least_float32(self.temperature)
