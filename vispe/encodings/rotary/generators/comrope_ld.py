"""ComRoPE with linearly dependent generators: all axes rotate the same planes (arXiv 2506.03737)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vispe.attention.precision import at_least_float32, exact_product
from vispe.encodings.parts.rotary.comrope import ComRoPE
from vispe.encodings.parts.rotary.skew_symmetric import exponential, promoted, skew_matrix, skew_upper
from vispe.encodings.registry import register


@register
class ComRoPELD(ComRoPE):
    """Rotates blocks of query and key channels by learned generators that axes share up to a factor.

    q' = R(p) q, k' = R(p) k, R = exp(sum_i p_i A_i); block j of A_i is theta_ij S_j, S_j = P_j - P_j^T
                                                                  arXiv 2506.03737, 'linearly dependent'

    The A_i commute, so R(p)^T R(p') = R(p' - p): attention sees offsets only. ``form='folded'`` is the same method
    without matrix exponentials: S_j = B_j^T diag(rates) B_j with 2 x 2 rotations on the diagonal, and B_j cancels
    in q'.k' once it is part of the projections of q and k; what remains is RoPE with learned 2D frequencies
    rate * theta per head, one sine and cosine per pair. `fold` converts a trained matrix form to it, exactly.

    ``comrope_ld.reference`` has the class token in the centre and random displacements in training, as the best rows
    of the paper's table 1; ``comrope_ld.folded`` is the folded form.

    Args:
        dim: width of the tokens; its channels per head are d_h.
        num_heads: heads, h.
        head_dim: channels of a head, d_h; dim / num_heads by default.
        axes: number of axes, 1 to 3.
        block: channels per block, s; 8 by default, or d_h if that is less. Channels beyond a multiple of it pass
            unchanged.
        form: 'matrix' (s (s - 1) / 2 parameters per block) or 'folded' (s // 2 frequencies per block).
        normalize: 'axis' has coordinates (i + 0.5) / n per axis; 'common' divides all axes by the larger of the last
            two, so that patches stay square; 'none' leaves units of `Grid.spacing`.
        cls_position: coordinate of class and register tokens on every axis, None for no rotation.
        init: 'normal' (entries of P have standard deviation init_std) or 'geometric' (frequencies init_std *
            base ** k, k = 0, 1, ..., in the planes of neighbouring channels); theta is normal in both.
        init_std: standard deviation, or first frequency, of `init`; 0 starts as the model without encoding.
        base: ratio of neighbouring frequencies; by default the last is near a hundredth of the first.
        jitter: in training, displace positions by clip(0.5 * jitter * gauss, -0.5, 0.5) cells, except along frames.
        jitter_offset: in training, shift all positions together by jitter_offset * gauss.

    Shapes: pos (n, axes) -> matrices (1, h, n, d_h / s, s, s) or tables (1, h, n, pairs).
    New resolution: normalised coordinates interpolate; nothing is resampled.   Cost: h d_h (s - 1) / 2 + axes d_h / s
        parameters per layer, folded h d_h / 2 in place of the first; matrices of n h d_h s numbers, folded n h d_h.
    Invariant to: translation, in coordinates; class tokens are absolute unless they have a position.
    Raises: ShapeError if `pos` has other axes; OptionError for incompatible options.
    Differs from the reference: only what is above the diagonal of P - P^T is a parameter (P counts each number
        twice; checkpoints are converted); class tokens have no position unless `cls_position` is set (reference: 0.5);
        angles are in float32 for every model dtype; grids need not be square.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("comrope_ld", dim=16, num_heads=2)
        >>> encoding.transform(Grid((2, 3)).positions(), 0).query(torch.ones(1, 2, 6, 8)).shape
        torch.Size([1, 2, 6, 8])
    """

    name = "comrope_ld"
    paper = (
        "ComRoPE: Scalable and Robust Rotary Position Embedding Parameterized by Trainable Commuting Angle Matrices, "
        "https://arxiv.org/abs/2506.03737"
    )
    year = 2025
    encodes = ("distance", "direction")
    invariant = ("translation",)
    formula = (
        r"q' = R(p) \, q, \quad k' = R(p) \, k, \quad R(p) = \exp \Big( \sum_a p_a A_a \Big), \quad "
        r"A_{aj} = \theta_{aj} \left( P_j - P_j^\top \right)"
    )
    tested_options = (
        "form=folded",
        "block=3",
        "init=geometric,base=0.5",
        "normalize=common",
        "normalize=none,init_std=0.2",
        "jitter=0.5,jitter_offset=0.3",
        "form=folded,jitter=1",
        "axes=1",
        "axes=3,form=folded",
    )
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "reference": {"cls_position": 0.5, "jitter": 1.0},
        "folded": {"form": "folded"},
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        self.theta = nn.Parameter(torch.empty(self.axes, self.blocks))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the generators, and the axes' factors from a standard normal."""
        super().reset_parameters()
        nn.init.normal_(self.theta)

    def _order(self) -> tuple[Tensor, int]:
        return torch.arange(self.blocks), self.blocks

    def generators(self) -> Tensor:
        """Return the generators (h, axes, blocks, s, s)."""
        theta = at_least_float32(self.theta)[..., None, None]
        # (h or 1, 1, blocks, s, s) times the factors of the axes, (axes, blocks, 1, 1)
        return skew_matrix(at_least_float32(self.skew), self.width) * theta

    def _phases(self, coordinates: Tensor) -> Tensor:
        # (b, n, axes) @ (axes, blocks) -> (b, n, blocks)
        return exact_product(coordinates, self.theta)

    def _on_grid(self, lines: list[tuple[Tensor, Tensor]]) -> Tensor:
        generators = self.generators()
        # generators commute, so exp of the sum is a product over axes: n_1 + n_2 exponentials instead of n_1 n_2
        rotations = [
            exponential(generators[:, i : i + 1], promoted(line, self.skew)[None, :, None]).index_select(
                2, index
            )
            for i, (line, index) in enumerate(lines)
        ]
        total = rotations[0]
        for rotation in rotations[1:]:
            total = exact_product(total, rotation)
        return total

    def rename_checkpoint_keys(self, state_dict: dict[str, Any], parent_prefix: str, prefix: str) -> None:
        """Rename `freqs` (h, 1, blocks, s, s) and `multiplier` of released checkpoints from the attention layer."""
        if self.form == "matrix" and f"{parent_prefix}freqs" in state_dict:
            state_dict[f"{prefix}skew"] = skew_upper(state_dict.pop(f"{parent_prefix}freqs"))
            # (1, axes, blocks, 1, 1) -> (axes, blocks)
            state_dict[f"{prefix}theta"] = state_dict.pop(f"{parent_prefix}multiplier")[0, :, :, 0, 0]
