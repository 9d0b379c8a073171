"""Sine-cosine encoding of the patch order along a space-filling curve (LOOPE, arXiv 2504.14386)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vispe.attention.precision import at_least_float32, same_grid
from vispe.encodings.base import Additive
from vispe.encodings.parts.additive.fourier import ProgressiveBands, with_first
from vispe.encodings.parts.additive.gilbert_curve import ordered_indices
from vispe.encodings.parts.additive.image_shift import ImageShift, ReleasedShift
from vispe.encodings.parts.additive.index_waves import (
    interleaved_waves,
    of_tokens,
    rounded_angles,
    wave_rates,
)
from vispe.encodings.parts.additive.loope_checkpoint import (
    check_matrix,
    rename_released_keys,
    resample_offset,
)
from vispe.encodings.parts.coords import exact_device
from vispe.encodings.parts.resample import training_grid
from vispe.encodings.registry import register
from vispe.errors import OptionError, ShapeError
from vispe.grid import Positions
from vispe.utils.options import PositiveEvenInt, PositiveFloat, PositiveInt


@register
class Loope(ProgressiveBands, Additive):
    """Adds sines and cosines of each patch's index along a space-filling curve, with image-dependent shifts.

    [sin(X w_i), cos(X w_i)] interleaved, w_i = temperature^(-2i / d), X = curve index + shift        arXiv 2504.14386

    The index counts along the generalised Hilbert ("Gilbert") curve from 1; a shift in (-1, 1) may exchange neighbours.
    Bare ``loope`` predicts the shift from the image by convolutions that support any grid and start at 0.
    ``loope.static`` has only the curve, ``loope.cells`` a learned order, one shift per cell for all images,
    and ``loope.released`` the network of the authors' code.

    Args:
        dim: width of the tokens, d; even.
        grid: shape of the model's grid, (h, w).
        order: 'gilbert' or 'raster' (row by row).
        start: the side along which the curve starts: 'width' (the authors' code), 'longer' (their supplement: the
            height if that is larger), 'even' (the height if only it is even: then no step is diagonal).
        context: the shift: 'image', 'released', 'cells' or 'none', as above.
        class_token: vector of the first prefix token: 'learned', initially 0; 'origin', the encoding of X = 0,
            as the authors' static tables have it; or 'zero'. No effect in a model without prefix tokens.
        rescale: multiply X by the ratio of the cells of the training grid to those of the grid, to keep its range.
        reference: shape of the training grid for `rescale`; that of the host by default.
        temperature: approximate ratio of the longest to the shortest wavelength.
        exact: reduce angles in float64; False rounds frequencies and angles to float32, as the
            authors' code does, with errors of 1e-5 at 200 cells and 1e-4 at 1000.
        in_chans: channels of the image that context='image' or 'released' reads.
        reveal: 'linear' or 'cosine' activates frequency bands during training, long wavelengths first (PINs, see
            `vispe.encodings.positions.set_progress`); 'none' uses all bands from the start.

    Shapes: pos of a grid (h, w) and images (b, in_chans, height, width) -> (1 or b, n, d) float32; prefix tokens get 0,
        except with `class_token`.
    New resolution: the curve of the new grid; see `rescale`. 'cells' resamples its shifts and 'released' the image to
        its training grid and the shifts back, both bilinear.
    Cost: none without context; 'image' 3 k parameters and a second, small patch embedding, 'cells' h w, 'released' 58 k
        and (h w)^2; tables per image are (b, n, d).
    Invariant to: nothing.
    Raises: ShapeError if `pos` does not come from a 2-axis grid, or the image is missing; OptionError for
        incompatible options.
    Differs from the reference: 'image' has no batch norm, no activation after the last layer and no matrix over all
        cells, so it supports any grid, images of a batch are independent, and it starts at the static
        order; 'released' has all of these. See `exact`.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("loope.static", dim=16)
        >>> encoding.table(Grid((2, 3)).positions()).shape
        torch.Size([1, 6, 16])
    """

    name = "loope"
    paper = (
        "LOOPE: Learnable Optimal Patch Order in Positional Embeddings for Vision Transformers, "
        "https://arxiv.org/abs/2504.14386"
    )
    year = 2025
    encodes = ("position", "content")
    formula = (
        r"\left[ \sin X \omega_i, \; \cos X \omega_i \right], \quad \omega_i = T^{-2i / d}, \quad X = "
        r"\mathrm{index} + \mathrm{shift}"
    )
    tested_options = (
        "order=raster,context=none",
        "start=even,context=none,rescale=true,reference=[2,5]",
        "start=longer,context=cells",
        "context=none,class_token=zero,temperature=100",
        "context=none,class_token=origin",
        "context=released,rescale=true",
        "context=none,exact=false",
        "context=cells,exact=false,rescale=true",
    )
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "static": {"context": "none"},
        "cells": {"context": "cells"},
        "released": {"context": "released"},
    }

    dim: PositiveEvenInt
    grid: tuple[PositiveInt, PositiveInt] | None = None
    order: Literal["gilbert", "raster"] = "gilbert"
    start: Literal["width", "longer", "even"] = "width"
    context: Literal["image", "released", "cells", "none"] = "image"
    class_token: Literal["learned", "origin", "zero"] = "learned"
    rescale: bool = False
    reference: tuple[PositiveInt, ...] | None = None
    temperature: PositiveFloat = 10000.0
    exact: bool = True
    in_chans: PositiveInt = 3

    def __post_init__(self) -> None:
        self.reference = training_grid(self.reference, 2, self.rescale, "rescale=false")
        self._check_together()
        self.network = None
        if self.context == "image":
            self.network = ImageShift(self.in_chans)
        elif self.context == "released" and self.grid is not None:
            self.network = ReleasedShift(self.in_chans, self.grid)
        self.offset = nn.Parameter(torch.empty(self.grid or ())) if self.context == "cells" else None
        self.vector = nn.Parameter(torch.empty(1, self.dim)) if self.class_token == "learned" else None
        self.reset_parameters()

    def _check_together(self) -> None:
        if self.order == "raster" and self.start != "width":
            raise OptionError(f"start={self.start!r} has no effect with order='raster'. Omit it.")
        if self.context in ("none", "cells") and self.in_chans != 3:
            raise OptionError(
                f"in_chans={self.in_chans} has no effect with context={self.context!r}, which reads no image. Omit it."
            )
        if self.context in ("released", "cells") and self.grid is None:
            raise OptionError(
                f"loope with context={self.context!r} needs grid=(h, w), the grid of the training images."
            )

    def reset_parameters(self) -> None:
        """Initialise the network; the shifts of cells and the class token's vector are 0."""
        if self.network is not None:
            self.network.reset_parameters()
        for parameter in (self.offset, self.vector):
            if parameter is not None:
                nn.init.zeros_(parameter)

    def rename_checkpoint_keys(self, state_dict: dict[str, Any], parent_prefix: str, prefix: str) -> None:
        """Rename ``art_conv.*`` and ``cls_token`` of the released module, if its prefix is `prefix`."""
        del parent_prefix
        if self.context == "released":
            rename_released_keys(state_dict, prefix, class_token=self.vector is not None)

    def resample_checkpoint(
        self, state_dict: dict[str, Any], prefix: str, grid: tuple[int, ...] | None
    ) -> None:
        """Resample the cell shifts of another grid, as `shift` does; a matrix over cells cannot be resampled."""
        if self.grid is not None and self.offset is not None:
            resample_offset(state_dict, prefix, self.grid)
        if self.grid is not None and isinstance(self.network, ReleasedShift):
            check_matrix(state_dict, prefix, self.grid, grid)

    def static(self, pos: Positions) -> Tensor:
        """Return the index of each cell along the order, from 1, (h w,), float64 if available."""
        h, w = self._shape(pos)

        def make() -> Tensor:
            device = exact_device(pos.coords)
            if self.order == "raster":
                return torch.arange(1, h * w + 1, dtype=torch.float64, device=device)
            return ordered_indices(h, w, self.start, device)

        return pos.remember((self.name, self.order, self.start), make)

    def shift(self, pos: Positions, image: Tensor | None = None) -> Tensor | None:
        """Return the shift of each cell, (1 or b, h w) in (-1, 1); None without context."""
        shape = self._shape(pos)
        if self.offset is not None:
            offset = at_least_float32(self.offset)
            if self.grid is None or not same_grid(self.grid, shape):
                offset = F.interpolate(offset[None, None], size=shape, mode="bilinear", align_corners=False)
            # resampled before tanh, so that shifts remain in (-1, 1)
            return offset.reshape(1, -1).tanh()
        if self.network is None:
            return None
        if image is None or image.ndim != 4 or image.shape[1] != self.in_chans:
            shape_found = "none" if image is None else tuple(image.shape)
            raise ShapeError(
                f"loope needs images (b, {self.in_chans}, height, width) for its shift, got {shape_found}. Pass "
                "them to `table`, set in_chans, or use 'loope.static'."
            )
        return self.network(image, shape).flatten(1)

    def table(self, pos: Positions, image: Tensor | None = None) -> Tensor:
        """Return the encoding of every token, (1 or b, n, d) in float32 or better."""
        shape = self._shape(pos)
        reference = self.reference or (pos.grid and pos.grid.reference) or self.grid
        trained = reference if self.rescale else None
        # indices of a larger grid are compressed to the range of the training grid
        scale = 1.0 if trained is None else trained[0] * trained[1] / (shape[0] * shape[1])

        shift = self.shift(pos, image)
        angle = self._angles(pos, shift, scale, trained)
        table = self._opened(of_tokens(interleaved_waves(angle), pos))
        if self.vector is not None:
            return with_first(table, self.vector, pos)
        if self.class_token == "origin":
            return with_first(table, self._opened(interleaved_waves(torch.zeros_like(angle[0, :1]))), pos)
        return table

    def _opened(self, waves: Tensor) -> Tensor:
        return self.with_band_weights(waves, self.dim // 2, interleaved=True)

    def _angles(
        self, pos: Positions, shift: Tensor | None, scale: float, trained: tuple[int, ...] | None
    ) -> Tensor:
        """Return the angles of all cells, (1 or b, h w, d / 2)."""
        if not self.exact:
            index = (self.static(pos)[None] * scale).to(pos.coords.device, torch.float32)
            index = index if shift is None else index + (shift * scale).float()
            return rounded_angles(index, self.dim, self.temperature)

        def make() -> Tensor:
            static = self.static(pos)[None, :, None] * scale
            # reduced in float64: float32 would lose the phase at thousands of cells
            return (
                (static * wave_rates(self.dim, self.temperature, static))
                .remainder(2 * torch.pi)
                .to(pos.coords)
            )

        # key by `trained`, as the scale may be symbolic and unhashable
        angle = pos.remember((self.name, self.dim, self.order, self.start, self.temperature, trained), make)
        if shift is None:
            return angle
        # shifts depend on the image, so they are added after the cache
        return angle.to(shift.dtype) + (shift * scale)[..., None] * wave_rates(
            self.dim, self.temperature, shift
        )

    def _shape(self, pos: Positions) -> tuple[int, int]:
        h, w = self._need_grid(pos, "It orders the cells of the grid.").shape
        return h, w
