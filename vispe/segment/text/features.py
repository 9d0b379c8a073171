"""Similarity of every pixel to the text of each class, the input of `predict_page` for text models.

A page is padded by reflection to a multiple of the patch size and cut into overlapping tiles aligned with patches. Each
tile gives cosine similarities of its patches to all texts; where tiles overlap, similarities are averaged with a
window, patch by patch. The map of the page has one value per patch and class, so that it is small, and is
interpolated to pixels once, independently of the tiling.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from vispe.backbones.device import choose_device
from vispe.backbones.model_access import fingerprint
from vispe.errors import InputError, OptionError, counted
from vispe.segment.features.blend import window
from vispe.segment.features.pixel_features import BLOCK
from vispe.segment.features.tiles import blocks, padded_page, tiles
from vispe.segment.features.token_features import model_inputs
from vispe.segment.text.config import TextClassifier, TextConfig
from vispe.segment.text.prompts import Prompts
from vispe.segment.text.readouts import parse_readout
from vispe.segment.text.towers import read_tower
from vispe.segment.text.weights import build, find_weights, tokenizer

OVERLAP = 0.5
"""Minimal overlap of neighbouring tiles, as a fraction of their side."""

_LEAST = 64  # smallest side of a tile, in pixels
_TOKENS = 2048  # tokens per forward pass, which bounds the batch of tiles


class TextFeatures:
    """Similarity extractor of a `TextConfig`.

    Args:
        config: model and readout.
        classes: the texts; or, with a saved model, their text vectors.
        seed: seed of random weights.
        device: torch device; `'auto'` uses a GPU if available.

    Attributes:
        config: with the resolved weights and their fingerprint.
        classifier: text vectors of the classes.

    Raises:
        UnknownName, InputError, OptionError: weights are not available or do not match the fingerprint, or a
            prompt exceeds the context length.
        UnsupportedHost, UnsupportedCombination: the image tower does not support patch readouts.
    """

    basis = None

    def __init__(
        self, config: TextConfig, classes: Prompts | TextClassifier, *, seed: int = 0, device: str = "auto"
    ) -> None:
        self.device, self.tile, self._half = choose_device(device), config.tile, False
        checkpoint = find_weights(config.model, config.weights)
        readout = parse_readout(config.readout)
        model = build(checkpoint, config.pos_embed, readout, seed)
        self._tower = read_tower(model, readout)
        digest = fingerprint(self._tower.visual)
        if config.fingerprint not in (None, digest):
            raise InputError(
                f"the weights of {config.model} differ from those of the stored model (sha256 {digest[:12]}, "
                f"expected {config.fingerprint[:12]}). Pass the same checkpoint with weights."
            )
        self.config = replace(config, weights=checkpoint.weights, fingerprint=digest)
        if isinstance(classes, Prompts):
            classes = encode(model, tokenizer(checkpoint.name), classes)
        self.classifier = classes
        # copy: rounding depends on the memory alignment
        self._vectors = torch.tensor(classes.vectors)
        config = model.visual.preprocess_cfg
        self._mean, self._std = (torch.tensor(config[key]).view(3, 1, 1) for key in ("mean", "std"))
        self._tower.visual.to(self.device)

    def fit(self, pages: object) -> None:
        """Do nothing: text features are not learnt from pages."""

    def prepare(self, page: np.ndarray, valid: np.ndarray) -> TextPage:
        """Run the tower over a page, tile by tile.

        Args:
            page: (h, w, c) float32 grey levels in [0, 1]. One channel is passed as grey, three as colour; with 2 or
                more than 3 each channel is passed separately as grey, and the similarities are averaged.
            valid: (h, w) bool, pixels with data.

        Raises:
            InputError: similarities that are not finite.
        """
        filled = page if valid.all() else np.where(valid[..., None], page, np.float32(0))
        step = self._tower.patch_size
        framed, pads, notes = padded_page(filled, step)
        sides = [max((self.tile or side) // step, 1) * step for side in self._tower.size]
        sides = [min(side, length) for side, length in zip(sides, framed.shape, strict=False)]
        regions = tiles(*framed.shape[:2], (sides[0], sides[1]), step, OVERLAP)
        shape = framed.shape[0] // step, framed.shape[1] // step
        total, weights = torch.zeros(len(self._vectors), *shape), torch.zeros(shape)
        first, n_repeated, n_different = torch.zeros(shape, dtype=torch.long), 0, 0
        weight = torch.from_numpy(window(sides[0] // step, sides[1] // step))
        images = model_inputs(torch.from_numpy(framed).permute(2, 0, 1))
        count = max(_TOKENS // (weight.numel() + 1), 1)
        for start in range(0, len(regions), count):
            batch = regions[start : start + count]
            scores = sum(
                self._similarity(torch.stack([image[(slice(None), *r.slices)] for r in batch]))
                for image in images
            )
            for region, tile_scores in zip(batch, scores / len(images), strict=True):
                index = tuple(slice(s.start // step, s.stop // step) for s in region.slices)
                total[(slice(None), *index)] += tile_scores * weight
                weights[index] += weight
                # count disagreement of each tile with the first tile that contains the patch
                best, earlier = tile_scores.argmax(0) + 1, first[index]
                n_repeated += int((earlier > 0).sum())
                n_different += int(((earlier > 0) & (earlier != best)).sum())
                first[index] = torch.where(earlier > 0, earlier, best)
        if n_different:
            percent = 100 * n_different / n_repeated
            notes += (
                f"overlapping tiles predict different classes for {percent:.1f} % of their common patches.",
            )
        return TextPage((total / weights).numpy(), step, (pads[0], pads[2]), filled.shape[:2], notes)

    def shrink(self) -> str | None:
        """Reduce the memory of the next attempt: half the tile, then bfloat16, then the CPU.

        Returns:
            Description of the reduction; None if no further reduction is possible.
        """
        side = self.tile or max(self._tower.size)
        if side // 2 >= _LEAST:
            self.tile = side // 2
            return f"out of memory: the tile was halved to {self.tile} px."
        if self.device != "cpu" and not self._half:
            self._half = True
            return "out of memory: the model now runs in bfloat16."
        if self.device != "cpu":
            self.device, self._half = "cpu", False
            self._tower.visual.to("cpu")
            return "out of memory: continuing on the CPU."
        return None

    @torch.inference_mode()
    def _similarity(self, images: Tensor) -> Tensor:
        """Return similarities to the texts (b, K, rows, columns) of images (b, 3, h, w) in [0, 1], on the CPU."""
        batch = ((images - self._mean) / self._std).to(self.device)
        with torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=self._half):
            patches = self._tower(batch)
        cosines = normalize(patches.cpu(), dim=-1) @ self._vectors.T
        if not cosines.isfinite().all():
            raise InputError(f"{self.config.model} returns non-finite values. Check its weights.")
        return cosines.permute(0, 3, 1, 2)


class TextPage:
    """Similarities of one page, piece by piece; created by `TextFeatures.prepare`.

    Args:
        grid: (K, rows, columns) float32, for each patch of the padded page.
        step: patch size in pixels.
        offset: padding at (top, left), in pixels.
        frame: height and width of the page without padding.
        notes: messages for the user.
    """

    overlapping = False

    def __init__(
        self,
        grid: np.ndarray,
        step: int,
        offset: tuple[int, int],
        frame: tuple[int, int],
        notes: tuple[str, ...] = (),
    ) -> None:
        self.grid, self.notes = grid, notes
        self.pieces = blocks(*frame, BLOCK)
        self._rows, self._columns = (
            _between(length, begin, step, count)
            for length, begin, count in zip(frame, offset, grid.shape[1:], strict=True)
        )

    def weight(self, number: int) -> None:
        """Return None: pieces do not overlap."""

    def parts(self, number: int) -> list[np.ndarray]:
        """Return the result of `compute` as the only part."""
        return [self.compute(number)]

    def compute(self, number: int) -> np.ndarray:
        """Return the similarities (K, rows, columns) float32 of a piece, bilinearly interpolated between patches."""
        rows, columns = self.pieces[number].slices
        axes = ((self._rows, rows), (self._columns, columns))
        (top, bottom, down), (left, right, across) = (
            tuple(values[part] for values in axis) for axis, part in axes
        )
        lines = self.grid[:, top] + (self.grid[:, bottom] - self.grid[:, top]) * down[:, None]
        return lines[..., left] + (lines[..., right] - lines[..., left]) * across


def _between(length: int, begin: int, step: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the patches before and after each pixel of an axis, and the weight of the patch after, float32."""
    position = np.clip((np.arange(length) + begin + 0.5) / step - 0.5, 0, count - 1)
    before = np.floor(position).astype(np.int64)
    return before, np.minimum(before + 1, count - 1), (position - before).astype(np.float32)


@torch.inference_mode()
def encode(model: torch.nn.Module, tokenize: object, prompts: Prompts) -> TextClassifier:
    """Encode prompts as one vector per class: the normalised mean over its sentences, each of unit length.

    Args:
        model: an open_clip model, on the CPU.
        tokenize: its tokenizer.
        prompts: classes and sentences.

    Raises:
        OptionError: a sentence that exceeds the context length.
    """
    vectors = []
    for sentences in prompts.sentences():
        _check_length(tokenize, sentences)
        embeddings = normalize(model.encode_text(tokenize(sentences)).float(), dim=-1)
        vectors.append(normalize(embeddings.mean(0), dim=-1))
    return TextClassifier(torch.stack(vectors).numpy(), float(model.logit_scale.exp().max()))


def _check_length(tokenize: object, sentences: list[str]) -> None:
    """Raise OptionError if the tokenizer would truncate a sentence."""
    encode, limit = getattr(tokenize, "encode", None), getattr(tokenize, "context_length", None)
    if encode is None or limit is None:
        return
    for sentence in sentences:
        length = len(encode(sentence)) + 2
        if length > limit:
            raise OptionError(
                f"the prompt {sentence[:60]!r} has {counted(length, 'token')}, but the text tower supports {limit}. "
                "Shorten it."
            )
