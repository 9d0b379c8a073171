"""SeqPE added to the tokens: the 'input_add' form of arXiv 2506.13277."""

from __future__ import annotations

from torch import Tensor

from vispe.encodings.base import Additive
from vispe.encodings.parts.seqpe.tokens import DigitEncoding
from vispe.encodings.registry import register
from vispe.grid import Positions


@register
class SeqPEInput(DigitEncoding, Additive):
    """Adds vectors that a small transformer computes from each position's digits to the tokens.

    x + encoder(digits of (row, column))          arXiv 2506.13277, there 'input_add'

    Args:
        dim: width of the tokens, d.
        num_heads: heads of the encoder; those of the model by default.
        grid: shape of the model's grid; defines how many numbers a position has.
        axes: numbers per position, 1 to 3, if no grid is known; 2 by default.
        embed_dim: width of the encoder; d by default.
        layers: blocks of the encoder.
        max_digits: digits per axis, 2 by default (sides up to 100), in 1D 4.
        direction: 'causal' or 'bi' attention between digits.
        mask_padding: whether leading zeros are masked.
        final_norm: whether a norm precedes the output projection of the encoder.
        class_token: whether the result is read from a learned class token after the digits; otherwise from the last
            digit.
        class_vector: whether prefix tokens get a learned vector; otherwise 0.
        temperature: divisor of the result.
        dropout: dropout probability in both branches of the encoder's blocks, in training.
        shift: probability that a forward pass in training uses a window at a random offset instead of 0.

    Shapes: pos of a grid -> (1 or b, n, d) float32; prefix tokens get 0 without class_vector.
    New resolution: the encoder encodes the new indices, up to 10^max_digits per axis.   Cost: cells x 5 tokens (2D)
        through the encoder; once per grid and set of weights in inference.
    Invariant to: nothing.
    Raises: ShapeError without a grid, with other axes, or for a side beyond 10^max_digits.
    Differs from the reference: as `seqpe`.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("seqpe_input", dim=16, num_heads=2)
        >>> encoding.table(Grid((2, 3)).positions()).shape
        torch.Size([1, 6, 16])
    """

    name = "seqpe_input"
    paper = "SeqPE: Transformer with Sequential Position Encoding, https://arxiv.org/abs/2506.13277"
    year = 2025
    encodes = ("position",)
    tested_options = (
        "embed_dim=12,layers=1",
        "direction=bi,mask_padding=false",
        "class_token=false,final_norm=false",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reset_parameters()

    def table(self, pos: Positions, image: Tensor | None = None) -> Tensor:
        """Return the vectors of all tokens, (1 or b, n, d) in float32 or better."""
        return self.vectors(pos)
