"""Pixel features from a frozen transformer: patch tokens of any model of timm or open_clip, tile by tile.

The page is padded by reflection to whole patches, cut into overlapping tiles, and each tile gives a map of
final-norm patch tokens (class and register tokens left out). Their first principal components, fitted on the
training images, are what a classifier sees; bilinear upsampling brings them to pixels.

There can be more tokens than patches side by side: patches that overlap (`stride`), or several looks at the page, each
moved by a part of the stride (`shifts`). Looks are interleaved to one finer map, in which every token stays where it
was seen. The other way, averaging maps that were brought to pixels, needs a map of the page for every channel, and
blurs: it weighs each token by a triangle as wide as without the looks. Both give maps of the same geometry, cell i
centred at i * stride / shifts + patch / 2; but tokens of different looks do not attend to each other.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from vispe.backbones.model_access import image_size
from vispe.backbones.open_clip import load_model
from vispe.backbones.vision_model import VisionModel
from vispe.errors import OptionError, UnsupportedHost
from vispe.segment.features.coarse_features import CoarseMaps
from vispe.segment.features.tiles import Region, fingerprint, padding, tiles

MAX_TOKENS = 4096
"""A page of at most this many tokens a look is not cut into tiles unless a tile size is given."""

TILE = 518
"""Default tile side in pixels, rounded down to whole patches (518 for patch 14, 512 for patch 16).

Where patches overlap, tiles are as much smaller as a tile of at most `MAX_TOKENS` tokens demands.
"""

_FIT_TOKENS = 50_000


class TokenModel:
    """A frozen model of timm or open_clip that turns images into maps of tokens.

    Args:
        name: timm model name, with or without tag; or `open_clip:MODEL/TAG`.
        pos_embed: positional encoding spec of vispe; None keeps the model's own.
        weights: a checkpoint file; `'random'` for seeded random weights (tests); None for timm's pretrained
            ones.
        seed: of the random weights.
        device: torch device.
        half: run in bfloat16 (a way out of memory trouble; tokens are float32 anyway).
        stride: pixels between tokens of one look, a divisor of the patch; the patch by default.
        shifts: looks along each axis, a divisor of the stride; by default 2 where tokens of one map lie an even number
            of pixels apart, else 1.
        layers: blocks whose outputs are joined, negative from the end, each with the final norm; the last by default.

    Raises:
        UnknownName: no such model.
        InputError: weights that are not on disk while the hub cannot be reached, or that do not fit.
        UnsupportedHost: a model without intermediate feature maps, or one whose patches cannot overlap.
        UnsupportedCombination: overlapping patches with an encoding that counts tokens.
        OptionError: a stride, shifts or layers that the model does not have.
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
        model = load_model(name, pos_embed=pos_embed, weights=weights, any_size=True, seed=seed)
        self._features = VisionModel(model, layer=-1 if layers is None else layers, stride=stride)
        self._model = self._features.model.requires_grad_(False).to(self.device)
        # a pyramid of maps ends with patches larger than those that were embedded
        stages = getattr(self._model, "feature_info", None)
        self.patch = int(stages[-1]["reduction"]) if stages else self._features.patch
        self.flexible, self.size = not self._features.exact, image_size(self._model)
        if stride is not None and self._features.patch != self.patch:
            raise UnsupportedHost(
                f"{name} has maps of several sizes, so token_stride={stride} has no meaning for it; leave it out, or "
                "take a plain ViT."
            )
        self.stride = stride or self.patch
        # what synthetic tasks chose, see docs/explanation/vispe-micro.md
        several = self._features.patch == self.patch and self.stride % 2 == 0
        self.shifts = (2 if several else 1) if shifts is None else shifts
        if self.stride % self.shifts:
            raise OptionError(
                f"token_shifts={shifts} does not divide the {self.stride} px between tokens; choose a divisor of it."
            )

    @property
    def pitch(self) -> int:
        """Pixels between the cells of the finished map."""
        return self.stride // self.shifts

    @property
    def rim(self) -> float:
        """Pixels at the border of a tile that lie before the first cell and behind the last one."""
        return (self.patch - self.pitch) / 2

    @property
    def tile(self) -> int:
        """Side of a tile in pixels where none is given, in whole patches; at most `MAX_TOKENS` tokens a look."""
        most = (math.isqrt(MAX_TOKENS) - 1) * self.stride + self.patch
        return max(min(TILE, most) // self.patch, 1) * self.patch

    def tokens(self, height: int, width: int) -> int:
        """Return how many tokens one look at an image gives; sides in pixels, multiples of the patch."""
        rows, columns = ((side - self.patch) // self.stride + 1 for side in (height, width))
        return rows * columns

    def fingerprint(self) -> str:
        """Return the SHA-256 of all weights, to recognise the model later."""
        return fingerprint(self._model)

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> Tensor:
        """Run (b, 3, h, w) grey levels in [0, 1] -> (b, rows, columns, d) float32 tokens on the CPU."""
        batch = ((images - self._features.mean) / self._features.std).to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
            return self._features(batch).float().permute(0, 2, 3, 1).cpu()

    def looks(self, images: Tensor) -> Tensor:
        """Look `shifts` x `shifts` times, each a step of `pitch` pixels on -> (b, rows, columns, d), interleaved.

        Args:
            images: (b, 3, h, w), sides whole patches and (shifts - 1) * pitch pixels more.
        """
        if self.shifts == 1:
            return self(images)
        height, width = (side - (self.shifts - 1) * self.pitch for side in images.shape[-2:])
        out: Tensor | None = None
        for row in range(self.shifts):
            for column in range(self.shifts):
                top, left = row * self.pitch, column * self.pitch
                found = self(images[..., top : top + height, left : left + width])
                b, rows, columns, d = found.shape
                if out is None:
                    out = found.new_empty(b, rows, self.shifts, columns, self.shifts, d)
                out[:, :, row, :, column] = found
        return out.flatten(1, 2).flatten(2, 3)


class TokenMaps(CoarseMaps):
    """Tokens of the tiles of one page.

    Args:
        maps: for each tile (rows, columns, d) float32.
        basis: principal components that `coarse` gives; None until they are fitted.
        regions: the tiles on the padded page.
        offset: pixels added at (top, left).
        frame: height and width of the page without padding.
        notes: what the user should know.
        rim: pixels at the borders of a tile that lie outside of all cells.
    """

    def __init__(
        self,
        maps: list[np.ndarray],
        basis: "TokenBasis | None",
        regions: list[Region],
        offset: tuple[int, int],
        frame: tuple[int, int],
        notes: tuple[str, ...] = (),
        rim: float = 0.0,
    ) -> None:
        super().__init__(regions, offset, frame, notes)
        self.rim = rim
        self.maps, self.basis, self.width = maps, basis, maps[0].shape[-1]

    def coarse(self, number: int, again: bool = False) -> Tensor:
        """Return the components of a tile, (m, rows, columns) float32; tokens are held as long as this object."""
        assert self.basis is not None  # fitted, or from a model file, before pixels are asked for
        return torch.from_numpy(self.basis.project(self.maps[number])).permute(2, 0, 1)


@dataclass(frozen=True, eq=False)
class TokenBasis:
    """Principal components of tokens, standardised: (tokens - mean) @ components.T / scale."""

    mean: np.ndarray  # (d,)
    components: np.ndarray  # (m, d)
    scale: np.ndarray  # (m,)

    @classmethod
    def fit(cls, maps: list[np.ndarray], components: int, seed: int) -> "TokenBasis":
        """Fit to at most 50 000 of the tokens in `maps`; the largest loading of each component is positive."""
        from sklearn.decomposition import PCA

        flat = [m.reshape(-1, m.shape[-1]) for m in maps]
        ends = np.cumsum([len(one) for one in flat])
        if ends[-1] > _FIT_TOKENS:
            # drawn from each map: all tokens side by side would be a second copy of them
            drawn = np.sort(np.random.default_rng(seed).permutation(ends[-1])[:_FIT_TOKENS])
            parts = np.split(drawn, np.searchsorted(drawn, ends[:-1]))
            starts = ends - [len(one) for one in flat]
            flat = [one[part - start] for one, part, start in zip(flat, parts, starts, strict=True)]
        tokens = np.concatenate(flat)
        count = min(components, len(tokens), tokens.shape[1])
        with np.errstate(invalid="ignore", divide="ignore"):  # equal tokens, or a single one, have no spread
            pca = PCA(count, svd_solver="full").fit(tokens.astype(np.float64))
        largest = np.take_along_axis(pca.components_, np.abs(pca.components_).argmax(1)[:, None], 1)
        turned = pca.components_ * np.where(largest < 0, -1, 1)
        spread = np.sqrt(np.nan_to_num(pca.explained_variance_))
        scale = np.where(spread > 1e-6 * max(spread.max(initial=0), 1e-12), spread, 1)
        return cls(*(np.ascontiguousarray(a, np.float32) for a in (pca.mean_, turned, scale)))

    def project(self, tokens: np.ndarray) -> np.ndarray:
        """Project (..., d) -> (..., m) float32."""
        return ((tokens - self.mean) @ self.components.T / self.scale).astype(np.float32)

    def tensors(self) -> dict[str, np.ndarray]:
        """Return the arrays by name, for a model file."""
        return {"mean": self.mean, "components": self.components, "scale": self.scale}


def token_maps(
    model: TokenModel, page: np.ndarray, tile: int | None, basis: TokenBasis | None = None
) -> TokenMaps:
    """Run a model over a page, tile by tile.

    Args:
        model: the frozen model.
        page: (h, w, c) float32 in [0, 1], finite. One channel is shown to the model as grey, three as
            colour; with 2 or more than 3 each is run alone as grey, and their tokens are put side by side.
        tile: side of a tile in pixels, rounded down to whole patches. None: the whole page when it has at
            most `MAX_TOKENS` tokens a look, else `TokenModel.tile`. Models with a fixed input size use that size.
        basis: principal components, where they are fitted already.
    """
    step = model.patch
    framed, pads, notes = framed_page(page, step, (1, 1) if model.flexible else model.size)
    side = model.size
    if model.flexible:
        height, width = framed.shape[:2]
        whole = tile is None and model.tokens(height, width) <= MAX_TOKENS
        wanted = max(height, width) if whole else max((tile or model.tile) // step, 1) * step
        side = (min(wanted, height), min(wanted, width))
    regions = tiles(*framed.shape[:2], side, step)
    # looks to the right and below need pixels beyond; half of them are added on each side
    more = (model.shifts - 1) * model.pitch
    regions = [replace(r, bottom=r.bottom + more, right=r.right + more) for r in regions]
    around = (more // 2, more - more // 2)
    framed = np.pad(framed, (around, around, (0, 0)), mode="symmetric")
    maps = []
    for region in regions:
        cut = torch.from_numpy(np.ascontiguousarray(framed[region.slices])).permute(2, 0, 1)
        tokens = [model.looks(image[None])[0] for image in shown(cut)]
        maps.append(torch.cat(tokens, dim=-1).numpy())
    offset = (pads[0] + around[0], pads[2] + around[0])
    return TokenMaps(maps, basis, regions, offset, page.shape[:2], notes, model.rim)


def framed_page(
    page: np.ndarray, step: int, least: tuple[int, int] = (1, 1)
) -> tuple[np.ndarray, tuple[int, int, int, int], tuple[str, ...]]:
    """Pad a page (h, w, c) by reflection to whole patches.

    Args:
        page: pixels.
        step: side of a patch in pixels.
        least: height and width that it has at least.

    Returns:
        The padded page, pixels added at its (top, bottom, left, right), and notes.
    """
    height, width = page.shape[:2]
    pads = padding(height, width, step, least)
    framed = np.pad(page, (pads[:2], pads[2:], (0, 0)), mode="symmetric")
    if min(height, width) >= step:
        return framed, pads, ()
    note = f"the image is smaller than one patch of {step} px ({height} x {width}): padded by reflection."
    return framed, pads, (note,)


def shown(image: Tensor) -> list[Tensor]:
    """Return an image (c, h, w) as a model sees it, (3, h, w) each: three channels as colour, others each as grey."""
    return [image] if len(image) == 3 else [channel.expand(3, -1, -1) for channel in image[:, None]]
