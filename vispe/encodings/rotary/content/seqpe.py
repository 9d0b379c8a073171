"""SeqPE: position vectors from a small transformer over digit sequences (arXiv 2506.13277)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.dense import LowRankBias
from vispe.attention.transform.abstract_transform import Transform
from vispe.attention.transform.affine import Affine
from vispe.encodings.base import Biased, Rotary
from vispe.encodings.parts.layers import PreciseLinear
from vispe.encodings.parts.seqpe.losses import contrastive_loss, transfer_loss
from vispe.encodings.parts.seqpe.tokens import DigitEncoding
from vispe.encodings.registry import register
from vispe.errors import ShapeError, counted
from vispe.grid import Positions
from vispe.utils.options import Axes, PositiveInt

Mode = Literal["attn_mul", "attn_add", "attn_scalar"]
__all__ = ["SeqPE", "contrastive_loss", "transfer_loss"]


@register
class SeqPE(DigitEncoding, Rotary, Biased):
    """Multiplies queries and keys by vectors that a small transformer computes from each position's digits.

    e = encoder(digits of (row, column)); [pq, pk] = W_layer e; q * pq, k * pk          arXiv 2506.13277

    The released training adds two losses, see `auxiliary_losses`, which align far positions with near ones.
    Note the scale of e: with 'attn_mul', logits scale with its square.

    Args:
        dim: width of the tokens, d.
        num_heads: heads of the model and of the encoder, h.
        head_dim: channels of a head, d_h; dim / num_heads by default.
        depth: blocks of the model: one projection to pq, pk per block ('multi'); a single one without it.
        grid: shape of the model's grid; defines how many numbers a position has.
        axes: numbers per position, 1 to 3, if no grid is known; 2 by default.
        mode: 'attn_mul' (q * pq), 'attn_add' (q + pq) or 'attn_scalar' (pq . pk added to q . k, before the scale
            d_h^-0.5). Encoding + tokens ('input_add') is ``seqpe_input``.
        multi_head: whether every head has its own pq, pk; otherwise all share d / h channels.
        projection: 'multi' (per layer) or 'single' (shared by the layers).
        embed_dim: width of the encoder; d by default.
        out_dim: channels of e; embed_dim by default.
        layers: blocks of the encoder.
        max_digits: digits per axis, 2 by default (sides up to 100), in 1D 4.
        direction: 'causal' or 'bi' attention between digits.
        mask_padding: whether leading zeros are masked.
        final_norm: whether a norm precedes the output projection of the encoder.
        class_token: whether e is read from a learned class token after the digits; otherwise from the last digit.
        class_vector: whether prefix tokens have a learned e; otherwise they are unchanged.
        temperature: divisor of e.
        dropout: dropout probability in both branches of the encoder's blocks, in training.
        shift: probability that a forward pass in training uses a window at a random offset instead of 0.

    Presets: ``seqpe.vit_s`` and ``seqpe.vit_b`` are the settings of the released ImageNet runs.

    Shapes: pos of a grid -> q and k scaled or shifted per token, or a bias (1, h, n, n); prefix tokens pass
        unchanged without class_vector.
    New resolution: the encoder encodes the new indices, up to 10^max_digits per axis.   Cost: cells x 5 tokens (2D)
        through the encoder, per layer in training; once per grid and set of weights in inference.
    Invariant to: nothing.
    Raises: ShapeError without a grid, with other axes, or for a side beyond 10^max_digits.
    Differs from the reference: prefix tokens pass unchanged by default; the random offset is drawn again in each
        pass (in the reference from 320 stored ones); spacing has no effect, because digits encode cells.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("seqpe", dim=16, num_heads=2)
        >>> encoding.transform(Grid((2, 3)).positions(), 0).query(torch.ones(1, 2, 6, 8)).shape
        torch.Size([1, 2, 6, 8])
    """

    name = "seqpe"
    paper = "SeqPE: Transformer with Sequential Position Encoding, https://arxiv.org/abs/2506.13277"
    year = 2025
    encodes = ("position",)
    formula = (
        r"q' = p^q \odot q, \quad k' = p^k \odot k, \quad [p^q, p^k] = W_l "
        r"\operatorname{encoder}(\mathrm{row}, \mathrm{column})"
    )
    tested_options = (
        "mode=attn_add",
        "mode=attn_scalar",
        "multi_head=false",
        "projection=single",
        "embed_dim=12,out_dim=10,layers=1",
        "max_digits=3,mask_padding=false",
        "direction=bi",
        "class_token=false,final_norm=false",
        "temperature=2",
    )
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "vit_s": {"class_vector": True, "dropout": 0.1, "shift": 0.1},
        "vit_b": {"class_vector": True, "dropout": 0.3, "shift": 0.1},
    }

    dim: PositiveInt
    num_heads: PositiveInt
    head_dim: PositiveInt | None = None
    depth: PositiveInt | None = None
    grid: tuple[PositiveInt, ...] | None = None
    axes: Axes | None = None
    mode: Mode = "attn_mul"
    multi_head: bool = True
    projection: Literal["multi", "single"] = "multi"
    embed_dim: PositiveInt | None = None
    out_dim: PositiveInt | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        # without multi_head, all heads share one vector of d_h channels
        channels = self._resolve_head_dim() * (self.num_heads if self.multi_head else 1)
        count = self.depth if self.depth and self.projection == "multi" else 1
        self._last = -1  # the last layer that called
        self._block: int | None = None  # the block of this instance, see `restrict`
        # one projection for pq and pk
        self.pe_qk = nn.ModuleList(PreciseLinear(self._out, 2 * channels) for _ in range(count))
        self.reset_parameters()

    @property
    def _out(self) -> int:
        return self.out_dim or self.width

    def reset_parameters(self) -> None:
        """Draw weights from a truncated normal with std 0.02; biases are 0."""
        super().reset_parameters()
        for layer in self.pe_qk:
            if isinstance(layer, PreciseLinear):
                nn.init.trunc_normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)

    def truncate(self, depth: int) -> None:
        """Drop the projections of blocks from `depth` on."""
        if len(self.pe_qk) > depth > 0:
            self.pe_qk = self.pe_qk[:depth]
            self.depth = depth

    def restrict(self, layer: int) -> None:
        """Keep only the projection of block `layer`."""
        if len(self.pe_qk) > 1:
            self.pe_qk = self.pe_qk[layer : layer + 1]
            self.depth, self._block = None, layer

    def resample_checkpoint(
        self, state_dict: dict[str, Any], prefix: str, grid: tuple[int, ...] | None
    ) -> None:
        """Select the projection of this block in a checkpoint with those of all blocks."""
        entry_prefix = f"{prefix}pe_qk."
        # a second projection in the checkpoint: it has those of all blocks, this module only one
        if self._block is None or f"{entry_prefix}1.weight" not in state_dict:
            return
        saved = {k: state_dict.pop(k) for k in list(state_dict) if k.startswith(entry_prefix)}
        for kind in ("weight", "bias"):
            if f"{entry_prefix}{self._block}.{kind}" in saved:
                state_dict[f"{entry_prefix}0.{kind}"] = saved[f"{entry_prefix}{self._block}.{kind}"]

    def _factors(self, pos: Positions, layer: int) -> tuple[Tensor, Tensor]:
        """Return pq and pk of a block, (1 or b, h or 1, n, d_h) each."""
        if len(self.pe_qk) > 1 and not 0 <= layer < len(self.pe_qk):
            raise ShapeError(
                f"seqpe has projections for {counted(len(self.pe_qk), 'block')}, got a call for block {layer}."
            )
        module = self.pe_qk[layer if len(self.pe_qk) > 1 else 0]
        same_pass = False
        if not torch.compiler.is_compiling():
            # layers call in order, a lower number is a new forward pass; replicas of DataParallel begin with -1
            same_pass, self._last = layer > self._last >= 0, layer
        projected = cast("PreciseLinear", module)(self.vectors(pos, same_pass))
        heads = self.num_heads if self.multi_head else 1
        # (b or 1, n, 2 h d_h) -> (2, b or 1, h, n, d_h), with h = 1 for shared heads
        pair = projected.reshape(*projected.shape[:2], 2, heads, -1).permute(2, 0, 3, 1, 4)
        return pair[0], pair[1]

    def transform(self, pos: Positions, layer: int, x: Tensor | None = None) -> Transform:
        """Return the factors or summands of queries and keys of block `layer`."""
        if self.mode == "attn_scalar":
            return Transform()
        pq, pk = self._factors(pos, layer)
        if self.mode == "attn_mul":
            return Affine(q_mul=self._bare(pq, pos, 1.0), k_mul=self._bare(pk, pos, 1.0))
        return Affine(q_add=self._bare(pq, pos, 0.0), k_add=self._bare(pk, pos, 0.0))

    def bias(self, pos: Positions, layer: int, x: Tensor | None = None) -> Bias | None:
        """Return pq . pk of block `layer` with mode='attn_scalar', else None."""
        if self.mode != "attn_scalar":
            return None
        pq, pk = self._factors(pos, layer)
        # scaled like the logits q . k, to which the bias is added
        scale = self._resolve_head_dim() ** -0.5
        return LowRankBias(self._bare(pq * scale, pos, 0.0), self._bare(pk, pos, 0.0), pos)

    def _bare(self, values: Tensor, pos: Positions, neutral: float) -> Tensor:
        """Return the values with `neutral` at prefix tokens without a vector."""
        if self.class_vector or "seqpe" in pos.attrs:
            return values
        return torch.where(pos.spatial[:, None, :, None], values, neutral)
