"""Network of SeqPE: a small pre-norm transformer over the digits of a position (arXiv 2506.13277)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vispe.attention.precision import at_least_float32
from vispe.encodings.parts.layers import EmbeddingTable, PreciseLinear, PreciseNorm
from vispe.utils.autocast import no_autocast

Direction = Literal["causal", "bi"]


def digits_of(cells: Tensor, count: int, base: int = 10) -> tuple[Tensor, Tensor]:
    """Return the digits of integers (p, a), and a mask of the digits that are not padding.

    Args:
        cells: (p, a) int64, 0 or more.
        count: digits per axis; numbers are zero-padded on the left.
        base: base of the digits.

    Returns:
        digits (p, a * count) int64 and a bool mask of the same shape; the number 0 has one digit.
    """
    powers = base ** torch.arange(count - 1, -1, -1, device=cells.device)
    # cells // base^k is 0 before the leading digit; the last digit is never padding
    lead = cells[..., None].div(powers, rounding_mode="floor")
    real = (lead > 0) | (powers == 1)
    return (lead % base).flatten(1), real.flatten(1)


def may_attend(real: Tensor, direction: Direction, mask_padding: bool, class_token: bool) -> Tensor:
    """Return the attention mask (p, s, s), True = attend, of digits (p, s or s - 1) and a class token, if any."""
    keys = real if mask_padding else torch.ones_like(real)
    if class_token:
        keys = F.pad(keys, (0, 1), value=True)
    # (p, s) -> (p, s, s): all digits have the same keys, before the causal mask
    mask = keys[:, None].expand(-1, keys.shape[1], -1)
    return mask.tril() if direction == "causal" else mask


class Projection(nn.Module):
    """A linear map whose weight is (inputs, outputs), as in GPT-2 and the released checkpoints."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.empty(inputs, outputs)),
            nn.Parameter(torch.empty(outputs)),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return x W + b."""
        return x @ at_least_float32(self.weight) + at_least_float32(self.bias)


class DigitAttention(nn.Module):
    """Self-attention between the digits of one position."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn, self.c_proj = Projection(width, 3 * width), Projection(width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return the sequences (p, s, e) after attention within `mask` (p, s, s)."""
        # (p, s, 3 e) -> three of (p, heads, s, e / heads)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.c_attn(x).chunk(3, -1))
        logits = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        # a padded digit may have no visible key; its output is not used, but must not be NaN
        weights = logits.masked_fill(~mask[:, None], torch.finfo(logits.dtype).min).softmax(-1)
        return self.c_proj((weights @ v).transpose(1, 2).flatten(2))


class DigitMLP(nn.Module):
    """The MLP of a block, four times as wide, with the tanh form of GELU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc, self.c_proj = Projection(width, 4 * width), Projection(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sequences after the MLP."""
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class DigitBlock(nn.Module):
    """A pre-norm block; the names are those of the released checkpoints."""

    def __init__(self, width: int, heads: int, eps: float) -> None:
        super().__init__()
        self.attn, self.mlp = DigitAttention(width, heads), DigitMLP(width)
        self.layernorm_1, self.layernorm_2 = PreciseNorm(width, eps), PreciseNorm(width, eps)

    def forward(self, x: Tensor, mask: Tensor, keep: Tensor | None) -> Tensor:
        """Return the sequences after the block; `keep` (2, p, s, e) are the factors of dropout."""
        y = self.attn(self.layernorm_1(x), mask)
        x = x + (y if keep is None else y * keep[0])
        y = self.mlp(self.layernorm_2(x))
        return x + (y if keep is None else y * keep[1])


class DigitEncoder(nn.Module):
    """Encodes integer positions (p, a) as vectors (p, out).

    Args:
        width: channels of the transformer, e.
        heads: attention heads.
        layers: number of blocks.
        axes: numbers per position, a.
        max_digits: digits per number.
        out: channels of the output.
        direction: 'causal' or 'bi'.
        final_norm: whether a norm precedes the output projection.
        mask_padding: whether padded digits are masked.
        class_token: whether the output is read from a learned class token instead of the last digit.
        temperature: divisor of the output.
        base: base of the digits.
        eps: epsilon of the norms.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        layers: int,
        axes: int,
        max_digits: int,
        out: int,
        *,
        direction: Direction = "causal",
        final_norm: bool = True,
        mask_padding: bool = True,
        class_token: bool = True,
        temperature: float = 1.0,
        base: int = 10,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.axes, self.max_digits, self.base = axes, max_digits, base
        self.direction: Direction = direction
        self.mask_padding, self.class_token, self.temperature = mask_padding, class_token, temperature
        self.token_of_seqpe_embed = EmbeddingTable(base, width)
        self.pos_of_seqpe_embed = EmbeddingTable(axes * max_digits, width)
        self.dim_token_embed = nn.Parameter(torch.empty(axes, 1, width)) if axes > 1 else None
        self.cls_token_embed = nn.Parameter(torch.empty(1, 1, width)) if class_token else None
        self.transformers = nn.ModuleList(DigitBlock(width, heads, eps) for _ in range(layers))
        self.layernorm = PreciseNorm(width, eps) if final_norm else None
        self.out_proj = PreciseLinear(width, out)
        self.reset_parameters()

    @property
    def length(self) -> int:
        """Tokens of one sequence."""
        return self.axes * self.max_digits + int(self.class_token)

    def reset_parameters(self) -> None:
        """Draw weights from a truncated normal with std 0.02; biases are 0, norms the identity."""
        norms = {id(p) for m in self.modules() if isinstance(m, PreciseNorm) for p in m.parameters()}
        for name, p in self.named_parameters():
            if id(p) in norms:
                nn.init.constant_(p, float(name.endswith("weight")))
            elif name.endswith("bias"):
                nn.init.zeros_(p)
            else:
                nn.init.trunc_normal_(p, std=0.02)

    def forward(self, cells: Tensor, keep: Tensor | None = None) -> Tensor:
        """Return the vectors (p, out) of positions (p, a) int64, in float32 or better.

        Args:
            cells: positions, each below ``base ** max_digits``.
            keep: dropout factors (layers, 2, p, s, e), or None.
        """
        digits, real = digits_of(cells, self.max_digits, self.base)
        mask = may_attend(real, self.direction, self.mask_padding, self.class_token)
        with no_autocast(cells.device):
            embed = at_least_float32(self.token_of_seqpe_embed.weight)
            # embeddings of the digit, of its index in the sequence, and of its axis
            x = embed.index_select(0, digits.flatten()).reshape(*digits.shape, -1)
            x = x + at_least_float32(self.pos_of_seqpe_embed.weight)
            if self.dim_token_embed is not None:
                # (axes, 1, e) -> (axes * digits, e): digits of an axis are adjacent
                x = x + at_least_float32(self.dim_token_embed).expand(-1, self.max_digits, -1).flatten(0, 1)
            if self.cls_token_embed is not None:
                last = at_least_float32(self.cls_token_embed).expand(x.shape[0], -1, -1)
                x = torch.cat([x, last], 1)
            for i, block in enumerate(self.transformers):
                x = block(x, mask, None if keep is None else keep[i])
            # the last token has attended to all digits
            x = x[:, -1]
            if self.layernorm is not None:
                x = self.layernorm(x)
            out = F.linear(x, at_least_float32(self.out_proj.weight), at_least_float32(self.out_proj.bias))
            return out / self.temperature
