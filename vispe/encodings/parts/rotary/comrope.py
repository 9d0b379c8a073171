"""Base of `comrope_ap` and `comrope_ld`: commuting rotations as matrices, or folded into angles (ComRoPE)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor, nn

from vispe.attention.precision import at_least_float32
from vispe.attention.transform.abstract_transform import Transform
from vispe.attention.transform.pairs import PairRotation
from vispe.encodings.parts.rotary.comrope_coordinates import Normalize, grid_lines, jittered, normalized
from vispe.encodings.parts.rotary.rotation_planes import rotation_planes
from vispe.encodings.parts.rotary.skew_symmetric import (
    Block,
    SkewRotary,
    eigh,
    plane_entries,
    promoted,
    skew_matrix,
)
from vispe.errors import OptionError, ShapeError
from vispe.grid import PerToken, Positions
from vispe.utils.options import FiniteFloat, NonNegativeFloat, PositiveFloat

Form = Literal["matrix", "folded"]
Init = Literal["normal", "geometric"]


class ComRoPE(SkewRotary):
    """Base of encodings by commuting rotations: `comrope_ap` and `comrope_ld`."""

    block: Block | None = None
    form: Form = "matrix"
    normalize: Normalize = "axis"
    cls_position: FiniteFloat | None = None
    init: Init = "normal"
    init_std: NonNegativeFloat = 1.0
    base: PositiveFloat | None = None
    jitter: NonNegativeFloat = 0.0
    jitter_offset: NonNegativeFloat = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.base is not None and self.init != "geometric":
            raise OptionError(f"base={self.base} has no effect with init={self.init!r}. Use init=geometric.")
        self._set_blocks(self.block, self._parts)
        heads = 1 if self._shared else self.num_heads
        if self.form == "matrix":
            self._set_skew(heads, 1)
        else:
            self.rate = nn.Parameter(torch.empty(heads, self.blocks, self.width // 2))

    @property
    def _parts(self) -> int:
        """Number of groups of blocks with separate generators."""
        return 1

    @property
    def _shared(self) -> bool:
        """Whether heads share the generators."""
        return False

    @property
    def per_layer(self) -> bool:
        """True: every layer has its own rotations."""
        return True

    def reset_parameters(self) -> None:
        """Draw the generators, or in folded form their frequencies, from the same distribution."""
        with torch.no_grad():
            if self.init == "geometric":
                rates = self.frequencies(like=next(self.parameters()))
                if self.form == "folded":
                    self.rate.copy_(rates.expand_as(self.rate))
                else:
                    self.skew.zero_()
                    self.skew[..., plane_entries(self.width)] = -rates[None, None].to(self.skew)
            elif self.form == "matrix":
                self.skew.normal_(0.0, self.init_std * 2**0.5)  # the difference of two entries of P
            else:
                # entries above the diagonal
                size = self.width * (self.width - 1) // 2
                upper = torch.randn(*self.rate.shape[:2], size, device=self.rate.device)
                skew = skew_matrix(upper * self.init_std * 2**0.5, self.width)
                # eigenvalues of i S are +- rates in ascending order: the last s // 2 are the rates
                self.rate.copy_(eigh(1j * skew)[0][..., -self.rate.shape[-1] :])

    def frequencies(self, like: Tensor) -> Tensor:
        """Return the geometric frequencies (blocks, planes): `init_std` times powers of `base`, per axis."""
        order, count = self._order()
        planes = self.width // 2
        exponents = order[:, None] * planes + torch.arange(planes)
        # by default, frequencies fall to about 0.01 of the first
        base = 0.01 ** (1.0 / (count * planes)) if self.base is None else self.base
        return (self.init_std * float(base) ** exponents.double()).to(like.device, torch.float32)

    def _order(self) -> tuple[Tensor, int]:
        """Return the index of each block within its axis (blocks,), and the number of blocks per axis."""
        raise NotImplementedError

    def _phases(self, coordinates: Tensor) -> Tensor:
        """Return the factors (b, n, blocks) of the rates of each block."""
        raise NotImplementedError

    def prepare(
        self, pos: Positions, generator: torch.Generator | None = None, draws: dict[str, Tensor] | None = None
    ) -> Positions:
        """Draw the displacements of this forward pass while training (`jitter`, `jitter_offset`).

        Args:
            pos: positions of the input.
            generator: source of the draws.
            draws: standard normal numbers to use instead: 'comrope_jitter' (1 or b, n, axes) and
                'comrope_offset' (axes,).
        """
        supplied = draws or {}
        noises: dict[str, Any] = {}
        for key, amount, shape in (
            ("comrope_jitter", self.jitter, (1, pos.tokens, pos.axes)),
            ("comrope_offset", self.jitter_offset, (pos.axes,)),
        ):
            noise = supplied.get(key)
            if noise is None and self.training and amount and key not in pos.attrs:
                noise = torch.randn(shape, generator=generator, device=pos.coords.device)
            if noise is None:
                continue
            if noise.ndim != len(shape) or tuple(noise.shape[-2:]) != shape[-2:]:
                raise ShapeError(
                    f"{self.name} needs a draw of {key} of shape {shape}, got {tuple(noise.shape)}."
                )
            noises[key] = PerToken(noise, (1,)) if len(shape) > 1 else noise
        return pos.replace(attrs={**pos.attrs, **noises}) if noises else pos

    def coordinates(self, pos: Positions) -> Tensor:
        """Return the coordinates (b or 1, n, axes), normalised, with the displacements of `prepare`."""
        noise = pos.attrs.get("comrope_jitter") if self.jitter else None
        offset = pos.attrs.get("comrope_offset") if self.jitter_offset else None
        if noise is None and offset is None:
            key = ("comrope", self.normalize, self.cls_position)
            return pos.remember(key, lambda: self._displaced(pos, None, None))
        return self._displaced(pos, noise, offset)

    def _displaced(self, pos: Positions, noise: PerToken | None, offset: Tensor | None) -> Tensor:
        """Return the normalised coordinates with a displacement per token and an offset of all tokens."""
        x = pos.coords if noise is None else jittered(pos, noise.values, self.jitter)
        x = normalized(x, pos, self.normalize)
        of_prefix = torch.full_like(x, 0.0 if self.cls_position is None else self.cls_position)
        if offset is not None:
            shift = offset.to(x) * self.jitter_offset
            x = x + shift
            if self.cls_position is not None:  # otherwise, prefix tokens have no position to shift
                of_prefix = of_prefix + shift
        return torch.where(pos.spatial[..., None], x, of_prefix)

    def angles(self, pos: Positions) -> Tensor:
        """Return the angles of the folded form, (b or 1, h or 1, n, pairs)."""
        rate = at_least_float32(self.rate)
        phases = self._phases(promoted(self.coordinates(pos), rate))  # (b, n, blocks)
        # (b, 1, n, blocks, 1) * (1, h or 1, 1, blocks, planes) -> (b, h or 1, n, pairs)
        return (phases[:, None, ..., None] * rate[None, :, None]).flatten(-2)

    def transform(self, pos: Positions, layer: int, x: Tensor | None = None) -> Transform:
        """Return the rotation of queries and keys."""
        if self.form == "matrix":
            return super().transform(pos, layer, x)
        self._need_axes(pos)

        def tables() -> tuple[Tensor, Tensor]:
            angles = self.angles(pos)
            return angles.cos(), angles.sin()

        return PairRotation(*self._eval_cache(self, pos, tables), "interleaved")

    def rotations(self, pos: Positions) -> Tensor:
        """Return the rotation matrices (b or 1, h or 1, n, blocks, s, s).

        On a grid each axis has few distinct coordinates: exponentials are computed once per coordinate and
        multiplied, since all generators commute.
        """
        if self.form == "folded":
            raise OptionError(f"{self.name} has no matrices with form=folded, only angles. Use form=matrix.")
        coordinates = self.coordinates(pos)
        # one exponential per row and column is possible only for a full grid without displacements
        if not pos.regular or torch.compiler.is_compiling() or not pos.static or len(coordinates) > 1:
            return super().rotations(pos)
        key = ("comrope_lines", self.normalize, self.cls_position)
        moved = bool(self.jitter or self.jitter_offset) and (
            "comrope_jitter" in pos.attrs or "comrope_offset" in pos.attrs
        )
        lines = (
            None if moved or coordinates.is_meta else pos.remember(key, lambda: grid_lines(coordinates, pos))
        )
        return super().rotations(pos) if lines is None else self._on_grid(lines)

    def _on_grid(self, lines: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Return the rotations (1, h or 1, n, blocks, s, s) from the lines of `grid_lines`."""
        raise NotImplementedError

    def fold(self) -> tuple[Self, Tensor]:
        """Return an equivalent encoding in folded form, and the basis (h or 1, d_h, d_h) that it needs.

        Attention is unchanged if queries and keys are expressed in the basis, q -> basis q and k -> basis k:
        apply `in_basis` to the rows of their projections. The basis has no cost at run time.

        Raises:
            OptionError: the encoding is already in folded form.
        """
        if self.form == "folded":
            raise OptionError(f"{self.name} can only be folded with form=matrix, got form=folded.")
        options: dict[str, Any] = {k: v for k, v in self.config.items() if k != "name"}
        folded = cast("Callable[..., Self]", type(self))(**{**options, "form": "folded"})
        with torch.no_grad():
            # float64: eigenvectors of similar rates are ill-conditioned
            matrices = skew_matrix(self.skew[:, 0].double(), self.width)
            rates, basis = rotation_planes(matrices, self.head)
            folded.to(self.skew.device, self.skew.dtype)
            folded.rate.copy_(rates)
            for name, parameter in self.named_parameters():
                if name != "skew":
                    folded.get_parameter(name).copy_(parameter)
        return folded.train(self.training), basis

    @staticmethod
    def in_basis(rows: Tensor, basis: Tensor) -> Tensor:
        """Return the weight (h d_h, c) or bias (h d_h,) of a projection to queries or keys in the basis of `fold`."""
        head = basis.shape[-1]
        # of shape (h or 1, d_h, d_h) @ (h, d_h, c)
        rotated = basis.to(torch.float64) @ rows.reshape(-1, head, rows[0].numel()).double()
        return rotated.reshape(rows.shape).to(rows.dtype)
