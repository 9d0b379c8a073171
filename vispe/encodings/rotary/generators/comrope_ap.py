"""ComRoPE with axial partition: every block of channels is rotated by one axis (arXiv 2506.03737)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from vispe.attention.precision import at_least_float32
from vispe.encodings.parts.rotary.comrope import ComRoPE, Form
from vispe.encodings.parts.rotary.skew_symmetric import Block, exponential, promoted, skew_matrix, skew_upper
from vispe.encodings.registry import register

Partition = Literal["interleaved", "contiguous"]


@register
class ComRoPEAP(ComRoPE):
    """Rotates blocks of query and key channels by learned matrices, every block along one axis.

    q' = R(p) q, k' = R(p) k, R = exp(sum_i p_i A_i); block j of A_i is S_j = P_j - P_j^T when j belongs to axis i,
    else 0          arXiv 2506.03737, 'axial partition'

    The A_i commute, so R(p)^T R(p') = R(p' - p): attention sees offsets only. ``form='folded'`` is the same method
    without matrix exponentials: S_j = B_j^T diag(rates) B_j with 2 x 2 rotations on the diagonal, and B_j cancels
    in q'.k' once it is part of the projections of q and k; what remains is axial RoPE with learned frequencies
    per head, one sine and cosine per pair. `fold` converts a trained matrix form to it, exactly.

    ``comrope_ap.reference`` has the class token in the centre and random displacements in training, as the best rows
    of the paper's table 1; ``comrope_ap.folded`` is the folded form; ``comrope_ap.rope`` is initialised as axial
    RoPE: geometric frequencies, the same in every head.

    Args:
        dim: width of the tokens; its channels per head are d_h.
        num_heads: heads, h.
        head_dim: channels of a head, d_h; dim / num_heads by default.
        axes: number of axes, 1 to 3.
        block: channels per block, s; 8 by default, or at most d_h / axes. Channels beyond a multiple of
            axes * block pass unchanged.
        form: 'matrix' (s (s - 1) / 2 parameters per block) or 'folded' (s // 2 frequencies per block).
        partition: 'interleaved' gives block j to axis j mod axes, 'contiguous' gives each axis a run of blocks.
        share_heads: one set of generators for all heads of the layer.
        normalize: 'axis' has coordinates (i + 0.5) / n per axis; 'common' divides all axes by the larger of the last
            two, so that patches stay square; 'none' leaves units of `Grid.spacing`.
        cls_position: coordinate of class and register tokens on every axis, None for no rotation.
        init: 'normal' (entries of P have standard deviation init_std) or 'geometric' (frequencies init_std *
            base ** k, k = 0, 1, ... along each axis, in the planes of neighbouring channels).
        init_std: standard deviation, or first frequency, of `init`; 0 starts as the model without encoding.
        base: ratio of neighbouring frequencies; by default the last is near a hundredth of the first.
        jitter: in training, displace positions by clip(0.5 * jitter * gauss, -0.5, 0.5) cells, except along frames.
        jitter_offset: in training, shift all positions together by jitter_offset * gauss.

    Shapes: pos (n, axes) -> matrices (1, h, n, d_h / s, s, s) or tables (1, h, n, pairs).
    New resolution: normalised coordinates interpolate; nothing is resampled.   Cost: h d_h (s - 1) / 2 parameters per
        layer, folded h d_h / 2; matrices of n h d_h s numbers, folded n h d_h.
    Invariant to: translation, in coordinates; class tokens are absolute unless they have a position.
    Raises: ShapeError if `pos` has other axes; OptionError for incompatible options.
    Differs from the reference: only the entries above the diagonal of P - P^T are parameters (P has each number
        twice; checkpoints are converted); class tokens have no position unless `cls_position` is set (reference: 0.5);
        angles are in float32 for every model dtype; grids need not be square.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("comrope_ap", dim=16, num_heads=2)
        >>> encoding.transform(Grid((2, 3)).positions(), 0).query(torch.ones(1, 2, 6, 8)).shape
        torch.Size([1, 2, 6, 8])
    """

    name = "comrope_ap"
    paper = (
        "ComRoPE: Scalable and Robust Rotary Position Embedding Parameterized by Trainable Commuting Angle Matrices, "
        "https://arxiv.org/abs/2506.03737"
    )
    year = 2025
    encodes = ("distance", "direction")
    invariant = ("translation",)
    formula = r"q' = R(p) \, q, \quad k' = R(p) \, k, \quad R(p) = \exp \Big( \sum_a p_a A_a \Big)"
    tested_options = (
        "form=folded",
        "block=2,partition=contiguous",
        "block=3,share_heads=true",
        "init=geometric,base=0.5",
        "form=folded,init=geometric,init_std=9",
        "normalize=none,cls_position=null",
        "jitter=0.5",
        "form=folded,jitter=1,jitter_offset=0.3",
        "axes=1",
        "axes=3,block=2",
    )
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "reference": {"cls_position": 0.5, "jitter": 1.0},
        "folded": {"form": "folded"},
        "rope": {"block": 2, "partition": "contiguous", "init": "geometric", "share_heads": True},
    }

    block: Block | None = None
    form: Form = "matrix"
    partition: Partition = "interleaved"
    share_heads: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reset_parameters()

    @property
    def _parts(self) -> int:
        return self.axes

    @property
    def _shared(self) -> bool:
        return self.share_heads

    def _axis_of(self, device: torch.device | None = None) -> Tensor:
        """Return the axis of each block, (blocks,)."""
        block = torch.arange(self.blocks, device=device)
        if self.partition == "interleaved":
            return block % self.axes
        return block.div(self.blocks // self.axes, rounding_mode="floor")

    def _order(self) -> tuple[Tensor, int]:
        block, count = torch.arange(self.blocks), self.blocks // self.axes
        interleaved = self.partition == "interleaved"
        return block.div(self.axes, rounding_mode="floor") if interleaved else block % count, count

    def generators(self) -> Tensor:
        """Return the generators (h or 1, axes, blocks, s, s): block j is 0 except for its axis."""
        mask = torch.arange(self.axes, device=self.skew.device)[:, None] == self._axis_of(self.skew.device)
        # of shape (h or 1, 1, blocks, s, s) * (axes, blocks, 1, 1)
        return skew_matrix(at_least_float32(self.skew), self.width) * mask[..., None, None]

    def _phases(self, coordinates: Tensor) -> Tensor:
        # (b, n, axes) -> (b, n, blocks): each block reads the coordinate of its axis
        return coordinates.index_select(-1, self._axis_of(coordinates.device))

    def _on_grid(self, lines: list[tuple[Tensor, Tensor]]) -> Tensor:
        matrices = skew_matrix(at_least_float32(self.skew), self.width)
        axis_of = self._axis_of(matrices.device)
        # sorted by axis, so that the blocks of an axis are contiguous
        order = axis_of.argsort(stable=True)
        rotations: list[Tensor] = []
        for (line, index), mask in zip(lines, order.chunk(self.axes), strict=True):
            # one exponential per coordinate of the axis, then copied to its tokens
            matrices_exp = exponential(
                matrices.index_select(2, mask), promoted(line, self.skew)[None, :, None]
            )
            rotations.append(matrices_exp.index_select(2, index))
        # back to the original order of blocks
        return torch.cat(rotations, 3).index_select(3, order.argsort())

    def rename_checkpoint_keys(self, state_dict: dict[str, Any], parent_prefix: str, prefix: str) -> None:
        """Rename `freqs` (h, 1, blocks, s, s) of released checkpoints from the attention layer."""
        if self.form == "matrix" and f"{parent_prefix}freqs" in state_dict:
            state_dict[f"{prefix}skew"] = skew_upper(state_dict.pop(f"{parent_prefix}freqs"))
