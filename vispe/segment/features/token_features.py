"""Pixel features from a frozen transformer: patch tokens of any vision model, tile by tile.

The page is padded by reflection to a multiple of the patch size, cut into overlapping tiles, and each tile gives a map
of final-norm patch tokens (without class and register tokens). Their first principal components, fitted on the
training images, are the input of the classifier; bilinear upsampling brings them to pixels.

The token density can be increased in two ways: overlapping patches (`stride`), or several passes over the page, each
shifted by a fraction of the stride (`shifts`). The tokens of all passes are interleaved to one finer map, in which
every token has its own position. The alternative, averaging upsampled maps, needs a full-resolution map for every
channel, and blurs: each token is weighted by a triangle as wide as without shifts. Both ways give maps of the
same geometry, with cell i centred at i * stride / shifts + patch / 2. The difference is that tokens of
different passes do not attend to each other.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from vispe.backbones.load_model import load_model
from vispe.backbones.model_access import fingerprint, image_size
from vispe.backbones.model_names import NETWORKS
from vispe.backbones.vision_model import VisionModel
from vispe.errors import OptionError, UnsupportedHost
from vispe.segment.features.coarse_features import CoarseMaps
from vispe.segment.features.tiles import Region, padded_page, tiles
from vispe.segment.features.token_basis import TokenBasis

MAX_TOKENS = 4096
"""A page of at most this many tokens per pass is not tiled unless a tile size is set."""

TILE = 518
"""Default tile side in pixels, rounded down to a multiple of the patch (518 for patch 14, 512 for patch 16).

With overlapping patches, tiles are smaller, so that they have at most `MAX_TOKENS` tokens.
"""


class TokenModel:
    """A frozen vision model that maps images to maps of tokens.

    Args:
        name: model name of `load_model`: timm, open_clip, transformers or a retrofit.
        pos_embed: positional encoding spec of vispe; None uses the model's own.
        weights: a checkpoint file; `'random'` for seeded random weights (tests); None for the pretrained ones.
        seed: seed of the random weights.
        device: torch device.
        half: run in bfloat16, to reduce memory (the returned tokens are float32).
        stride: distance of the tokens of one pass in pixels, a divisor of the patch size (the default).
        shifts: passes along each axis, a divisor of the stride; by default 2 for single-map models with an even
            stride, else 1.
        layers: blocks whose outputs are concatenated, negative from the end, each with the final norm; the last by
            default.

    Raises:
        UnknownName: the model does not exist.
        InputError: the weights are not on disk and the hub is unreachable, or they do not match the model.
        UnsupportedHost: the model has no intermediate feature maps, or its patches cannot overlap.
        UnsupportedCombination: patches overlap, and the encoding depends on the number of tokens.
        OptionError: invalid stride, shifts or layers for this model, another kind of model, or an option without
            effect on it.
    """

    def __init__(
        self,
        name: str,
        *,
        pos_embed: str | None = None,
        weights: str | None = None,
        seed: int = 0,
        device: str = "cpu",
        half: bool = False,
        stride: int | None = None,
        shifts: int | None = None,
        layers: Sequence[int] | None = None,
    ) -> None:
        self.device, self.half = torch.device(device), half
        # a model file may name the model, so Python code is not supported
        options = {"pos_embed": pos_embed, "weights": weights, "seed": seed, "kinds": (*NETWORKS, "micro")}
        loaded = load_model(name, any_size=True, **options)
        layer = -1 if layers is None else layers
        self._features = VisionModel(loaded.model, layer=layer, stride=stride, **loaded.settings)
        self._model = self._features.model.requires_grad_(False).to(self.device)
        # hierarchical models: the last stage has a larger stride than the patch embedding
        stages = getattr(self._model, "feature_info", None)
        self.patch_size = int(stages[-1]["reduction"]) if stages else self._features.patch_size
        self.flexible, self.size = not self._features.exact, image_size(self._model)
        if stride is not None and self._features.patch_size != self.patch_size:
            raise UnsupportedHost(
                f"{name} has feature maps of several sizes, so token_stride={stride} does not apply. Omit it, or "
                "use a plain ViT."
            )
        self.stride = stride or self.patch_size
        # chosen on synthetic tasks, see docs/explanation/vispe-micro.md
        interleaved = self._features.patch_size == self.patch_size and self.stride % 2 == 0
        self.shifts = (2 if interleaved else 1) if shifts is None else shifts
        if self.stride % self.shifts:
            raise OptionError(
                f"token_shifts={shifts} does not divide the token stride of {self.stride} px. Use a divisor of it."
            )

    @property
    def pitch(self) -> int:
        """Stride in pixels of the interleaved map."""
        return self.stride // self.shifts

    @property
    def margin(self) -> float:
        """Pixels at the border of a tile before the first cell and after the last one."""
        return (self.patch_size - self.pitch) / 2

    @property
    def tile(self) -> int:
        """Default side of a tile in pixels, a multiple of the patch; at most `MAX_TOKENS` tokens per pass."""
        most = (math.isqrt(MAX_TOKENS) - 1) * self.stride + self.patch_size
        return max(min(TILE, most) // self.patch_size, 1) * self.patch_size

    def tokens(self, height: int, width: int) -> int:
        """Return the number of tokens of one pass; sides in pixels, multiples of the patch."""
        # a patch starts at every stride, and the last one ends inside the image
        rows, columns = ((side - self.patch_size) // self.stride + 1 for side in (height, width))
        return rows * columns

    def fingerprint(self) -> str:
        """Return the SHA-256 of all weights."""
        return fingerprint(self._model)

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> Tensor:
        """Return the tokens (b, rows, columns, d) float32 on the CPU of grey levels (b, 3, h, w) in [0, 1]."""
        batch = ((images - self._features.mean) / self._features.std).to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
            return self._features(batch).float().permute(0, 2, 3, 1).cpu()

    def shifted_passes(self, images: Tensor) -> Tensor:
        """Return the interleaved tokens (b, rows, columns, d) of `shifts` x `shifts` passes, shifted by `pitch` pixels.

        Args:
            images: (b, 3, h, w), sides a multiple of the patch plus (shifts - 1) * pitch pixels.
        """
        if self.shifts == 1:
            return self(images)
        height, width = (side - (self.shifts - 1) * self.pitch for side in images.shape[-2:])
        out: Tensor | None = None
        for row in range(self.shifts):
            # out: (b, rows, row shift, columns, column shift, d), flattened to (b, rows * shifts, columns * shifts, d)
            for column in range(self.shifts):
                top, left = row * self.pitch, column * self.pitch
                tokens = self(images[..., top : top + height, left : left + width])
                b, rows, columns, d = tokens.shape
                if out is None:
                    out = tokens.new_empty(b, rows, self.shifts, columns, self.shifts, d)
                out[:, :, row, :, column] = tokens
        return out.flatten(1, 2).flatten(2, 3)


class TokenMaps(CoarseMaps):
    """Tokens of the tiles of one page.

    Args:
        maps: map (rows, columns, d) float32 of each tile.
        basis: principal components applied by `coarse`; None until they are fitted.
        regions: the tiles on the padded page.
        offset: padding at (top, left), in pixels.
        frame: height and width of the page without padding.
        notes: messages for the user.
        margin: pixels at the borders of a tile outside of all cells.
    """

    def __init__(
        self,
        maps: list[np.ndarray],
        basis: "TokenBasis | None",
        regions: list[Region],
        offset: tuple[int, int],
        frame: tuple[int, int],
        notes: tuple[str, ...] = (),
        margin: float = 0.0,
    ) -> None:
        super().__init__(regions, offset, frame, notes)
        self.margin = margin
        self.maps, self.basis, self.width = maps, basis, maps[0].shape[-1]

    def coarse(self, number: int, again: bool = False) -> Tensor:
        """Return the components of a tile, (m, rows, columns) float32; tokens are stored as long as this object."""
        assert self.basis is not None  # fitted, or loaded from a model file, before prediction
        return torch.from_numpy(self.basis.project(self.maps[number])).permute(2, 0, 1)


def token_maps(
    model: TokenModel,
    page: np.ndarray,
    tile: int | None,
    basis: TokenBasis | None = None,
    load: Callable[[int], Tensor] | None = None,
) -> TokenMaps:
    """Run a model over a page, tile by tile.

    Args:
        model: the frozen model.
        page: (h, w, c) float32 in [0, 1], finite. One channel is passed to the model as grey, three as
            colour; with 2 or more than 3 each channel is passed separately as grey, and the tokens are concatenated.
        tile: side of a tile in pixels, rounded down to a multiple of the patch. None: the complete page if it has at
            most `MAX_TOKENS` tokens per pass, else `TokenModel.tile`. Models with a fixed input size use that size.
        basis: principal components, if already fitted.
        load: reads the stored tokens (rows, columns, d) of a tile; None runs the model.
    """
    step = model.patch_size
    framed, pads, notes = padded_page(page, step, (1, 1) if model.flexible else model.size)
    side = model.size
    if model.flexible:
        height, width = framed.shape[:2]
        untiled = tile is None and model.tokens(height, width) <= MAX_TOKENS
        tile_side = max(height, width) if untiled else max((tile or model.tile) // step, 1) * step
        side = (min(tile_side, height), min(tile_side, width))
    regions = tiles(*framed.shape[:2], side, step)
    # shifted passes need extra pixels, half of them on each side
    extra = (model.shifts - 1) * model.pitch
    regions = [replace(r, bottom=r.bottom + extra, right=r.right + extra) for r in regions]
    margins = (extra // 2, extra - extra // 2)
    framed = np.pad(framed, (margins, margins, (0, 0)), mode="symmetric")
    maps = []
    for number, region in enumerate(regions):
        if load is not None:
            maps.append(load(number).numpy())
            continue
        crop = torch.from_numpy(np.ascontiguousarray(framed[region.slices])).permute(2, 0, 1)
        tokens = [model.shifted_passes(image[None])[0] for image in model_inputs(crop)]
        maps.append(torch.cat(tokens, dim=-1).numpy())
    offset = (pads[0] + margins[0], pads[2] + margins[0])
    return TokenMaps(maps, basis, regions, offset, page.shape[:2], notes, model.margin)


def model_inputs(image: Tensor) -> list[Tensor]:
    """Return the model inputs (3, h, w) of an image (c, h, w): three channels as colour, others each as grey."""
    return [image] if len(image) == 3 else [channel.expand(3, -1, -1) for channel in image[:, None]]
