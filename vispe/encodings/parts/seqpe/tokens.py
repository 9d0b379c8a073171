"""Base of `seqpe` and `seqpe_input`: a vector per token, computed from the digits of its position."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vispe.encodings.base import Encoding
from vispe.encodings.parts.coords import coordinate_count
from vispe.encodings.parts.seqpe.encoder import DigitEncoder, Direction
from vispe.encodings.parts.seqpe.losses import (
    contrastive_loss,
    contrastive_positions,
    transfer_loss,
    transfer_positions,
)
from vispe.errors import OptionError, ShapeError, counted
from vispe.grid import PerToken, Positions
from vispe.utils.options import Axes, NonNegativeInt, PositiveFloat, PositiveInt, Probability


class DigitEncoding(Encoding):
    """Encoding with a digit encoder; `seqpe` and `seqpe_input` define how its vectors are used."""

    ndim = (1, 2, 3)

    dim: PositiveInt
    num_heads: PositiveInt
    grid: tuple[PositiveInt, ...] | None = None
    axes: Axes | None = None
    embed_dim: PositiveInt | None = None
    layers: NonNegativeInt = 2
    max_digits: PositiveInt | None = None
    direction: Direction = "causal"
    mask_padding: bool = True
    final_norm: bool = True
    class_token: bool = True
    class_vector: bool = False
    temperature: PositiveFloat = 1.0
    dropout: Probability = 0.0
    shift: Probability = 0.0

    def __post_init__(self) -> None:
        self.coordinates = coordinate_count(self.name, self.axes, self.grid)
        self._accept(self.coordinates)
        self.width = self.embed_dim or self.num_heads * self._token_part()
        if self.width % self.num_heads:
            raise OptionError(
                f"{self.name} needs embed_dim={self.embed_dim} to be a multiple of num_heads={self.num_heads}."
            )
        if self.direction == "bi" and not self.class_token:
            raise OptionError(
                f"{self.name} with direction='bi' needs the class token, got class_token=false. Use class_token=true."
            )
        # 10^4 positions on one axis, 10^2 per axis on several
        self.digits = self.max_digits or (4 if self.coordinates == 1 else 2)
        self.encoder = DigitEncoder(
            self.width,
            self.num_heads,
            self.layers,
            self.coordinates,
            self.digits,
            self._out,
            direction=self.direction,
            final_norm=self.final_norm,
            mask_padding=self.mask_padding,
            class_token=self.class_token,
            temperature=self.temperature,
        )
        self.prefix_vector = nn.Parameter(torch.empty(self._out)) if self.class_vector else None

    @property
    def _out(self) -> int:
        """Channels of the encoder's vectors."""
        return self.dim

    def reset_parameters(self) -> None:
        """Initialise the encoder and the vector of prefix tokens (truncated normal with std 0.02)."""
        self.encoder.reset_parameters()
        if self.prefix_vector is not None:
            nn.init.trunc_normal_(self.prefix_vector, std=0.02)

    def prepare(
        self, pos: Positions, generator: torch.Generator | None = None, draws: dict[str, Tensor] | None = None
    ) -> Positions:
        """Draw dropout and the random shift of this forward pass while training.

        Args:
            pos: positions of the input.
            generator: source of the draws; the global one by default.
            draws: 'dropout' (layers, 2, cells, sequence, width) factors and 'shift' (axes,) integers.
        """
        if pos.grid is None or pos.axes not in self.ndim or "seqpe_drawn" in pos.attrs:
            return pos
        attrs = {f"seqpe_{k}": v for k, v in (draws or {}).items() if k in ("dropout", "shift")}
        if self.training:
            device = pos.coords.device
            if self.shift and "seqpe_shift" not in attrs:
                uniform = torch.rand(1 + pos.axes, generator=generator, device=device)
                # largest shift for which all cells have at most `digits` digits
                room = 10**self.digits - torch.tensor(pos.grid.shape, device=device)
                attrs["seqpe_shift"] = (uniform[1:] * (room + 1)).long() * (uniform[0] < self.shift)
            if self.dropout and "seqpe_dropout" not in attrs:
                size = (pos.grid.patches, self.encoder.length, self.width)
                noise = torch.rand(self.layers, 2, *size, generator=generator, device=device)
                # inverted dropout: factors 0 or 1 / (1 - p)
                attrs["seqpe_dropout"] = (noise >= self.dropout) / (1 - self.dropout)
        return pos.replace(attrs={**pos.attrs, **attrs, "seqpe_drawn": True}) if attrs else pos

    def vectors(self, pos: Positions, again: bool = False) -> Tensor:
        """Return the encoder's vector of every token, (1 or b, n, out); 0 for prefix tokens without `class_vector`.

        `again` states that this forward pass has called it before with the same parameters. Vectors in
        ``pos.attrs['seqpe']``, a `PerToken` (b or 1, n, out), replace those of the encoder.
        """
        vectors = pos.attrs.get("seqpe")
        if isinstance(vectors, PerToken):
            return vectors.values
        self._need_axes(pos)
        self._need_start(pos)
        if pos.grid is None:
            raise ShapeError(
                f"{self.name} needs integer positions, got free coordinates ({pos}). Use grid.positions()."
            )
        table = self._eval_cache(self.encoder, pos, lambda: self._encoded(pos), trust=again)
        if self.prefix_vector is None:
            first = table.new_zeros(1, table.shape[-1])
        else:
            first = self.prefix_vector[None].to(table.dtype)
        if pos.regular:
            return torch.cat([first.expand(pos.grid.prefix, -1), table])[None]
        # row 0 is the vector of prefix tokens
        row = torch.where(pos.spatial, pos.numbers() + 1, 0)
        return torch.cat([first, table]).index_select(0, row.flatten()).reshape(*row.shape, -1)

    def _encoded(self, pos: Positions) -> Tensor:
        shape: Sequence[int] = () if pos.grid is None else pos.grid.shape
        if max(shape) > 10**self.digits:
            raise ShapeError(
                f"{self.name} has {counted(self.digits, 'digit')} per axis, too few for a grid of {tuple(shape)}. "
                "Use a larger max_digits."
            )
        lines = [torch.arange(n, device=pos.coords.device) for n in shape]
        # of shape (cells, axes), row-major
        cells = torch.stack(torch.meshgrid(*lines, indexing="ij"), -1).flatten(0, -2)
        offset, keep = pos.attrs.get("seqpe_shift"), pos.attrs.get("seqpe_dropout")
        return self.encoder(cells if offset is None else cells + offset, keep)

    def auxiliary_losses(
        self,
        shape: Sequence[int],
        *,
        pivots: int = 32,
        candidates: int = 64,
        cells: int = 64,
        beta: float = 1.0,
        heads: int | None = None,
        generator: torch.Generator | None = None,
    ) -> dict[str, Tensor]:
        """Return the losses 'contrastive' and 'transfer' on newly drawn positions; the paper weights each by 0.1.

        Args:
            shape: the grid of the training resolution.
            pivots: pivots of the contrastive loss.
            candidates: candidates per pivot.
            cells: cells of the far window.
            beta: weight of the main term of the transfer loss; below 1, the training window gets a gradient too.
            heads: compute dot products per head; None for all channels at once.
            generator: source of the draws.
        """
        if len(shape) != self.coordinates or min(shape) < 1 or max(shape) > 10**self.digits:
            raise ShapeError(
                f"{self.name} needs a grid of {counted(self.coordinates, 'axis')} with 1 to {10**self.digits} cells, "
                f"got {tuple(shape)}."
            )
        device = self.encoder.out_proj.weight.device
        axes, digits = self.coordinates, self.digits
        pivot, others, labels = contrastive_positions(axes, digits, pivots, candidates, generator)
        index, far = transfer_positions(tuple(shape), digits, cells, generator)
        # strides of the training window, row-major
        strides = [int(torch.tensor(shape[i + 1 :]).prod()) for i in range(axes)]
        # cells of the training window from their row-major index
        near = index[:, None].div(torch.tensor(strides), rounding_mode="floor") % torch.tensor(shape)
        # one pass of the encoder for the positions of both losses
        parts = (pivot, others.flatten(0, 1), near, far)
        made = self.encoder(torch.cat(parts).to(device)).split([len(p) for p in parts])
        rows = torch.arange(len(index), device=device)
        return {
            "contrastive": contrastive_loss(made[0], made[1], labels.to(device), heads=heads),
            "transfer": transfer_loss(made[2], rows, made[3], beta=beta, heads=heads),
        }
