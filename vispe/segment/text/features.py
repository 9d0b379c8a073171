"""Similarity of every pixel to the text of each class, in place of features: what `predict_page` classifies.

A page is padded by reflection to whole patches and cut into overlapping tiles on the raster of patches. Each tile gives
cosine similarities of its patches to all texts; where tiles overlap, similarities are averaged under a window, patch by
patch. The map of the page has one value for each patch and class, so that it stays small, and is interpolated to
pixels once, whatever the tiles were.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from vispe.backbones.device import choose_device
from vispe.errors import InputError, OptionError
from vispe.segment.features.pixel_features import BLOCK
from vispe.segment.features.tiles import blocks, fingerprint, tiles, window
from vispe.segment.features.token_features import framed_page, shown
from vispe.segment.text.config import TextClassifier, TextConfig
from vispe.segment.text.prompts import Prompts
from vispe.segment.text.readouts import parse_readout
from vispe.segment.text.towers import read_tower
from vispe.segment.text.weights import build, find_weights, tokenizer

OVERLAP = 0.5
"""Least share of a tile that it has in common with the next one."""

_LEAST = 64  # tiles are not halved below this, in pixels
_TOKENS = 2048  # tokens that are run at once, in as many tiles as fit


class TextFeatures:
    """Computes similarities to texts as a `TextConfig` says.

    Args:
        config: model and readout.
        classes: the texts; or, with a saved model, the vectors that were made of them.
        seed: of random weights.
        device: torch device; `'auto'` takes a GPU when there is one.

    Attributes:
        config: with the weights that were found, and their fingerprint.
        classifier: vectors of the classes.

    Raises:
        UnknownName, InputError, OptionError: weights that cannot be found, or are not those of the fingerprint; a
            prompt that is longer than the text tower reads.
        UnsupportedHost, UnsupportedCombination: an image tower that cannot be read out.
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
                f"the weights of {config.model} are not those of the run that made the model (sha256 {digest[:12]}, "
                f"expected {config.fingerprint[:12]}); give the same checkpoint with --weights."
            )
        self.config = replace(config, weights=checkpoint.weights, fingerprint=digest)
        if isinstance(classes, Prompts):
            classes = encode(model, tokenizer(checkpoint.name), classes)
        self.classifier = classes
        # a copy: rounding depends on where numbers lie in memory
        self._vectors = torch.tensor(classes.vectors)
        config = model.visual.preprocess_cfg
        self._mean, self._std = (torch.tensor(config[key]).view(3, 1, 1) for key in ("mean", "std"))
        self._tower.visual.to(self.device)

    def fit(self, pages: object) -> None:
        """Do nothing: there is nothing to learn from pages."""

    def prepare(self, page: np.ndarray, valid: np.ndarray) -> TextPage:
        """Run the tower over a page, tile by tile.

        Args:
            page: (h, w, c) float32 grey levels in [0, 1]. One channel is shown as grey, three as colour; with 2 or more
                than 3 each is run alone as grey, and their similarities are averaged.
            valid: (h, w) bool, pixels with data.

        Raises:
            InputError: similarities that are not finite.
        """
        filled = page if valid.all() else np.where(valid[..., None], page, np.float32(0))
        step = self._tower.patch
        framed, pads, notes = framed_page(filled, step)
        sides = [max((self.tile or side) // step, 1) * step for side in self._tower.size]
        sides = [min(side, length) for side, length in zip(sides, framed.shape, strict=False)]
        regions = tiles(*framed.shape[:2], (sides[0], sides[1]), step, OVERLAP)
        shape = framed.shape[0] // step, framed.shape[1] // step
        total, weights = torch.zeros(len(self._vectors), *shape), torch.zeros(shape)
        first, again, differ = torch.zeros(shape, dtype=torch.long), 0, 0
        weight = torch.from_numpy(window(sides[0] // step, sides[1] // step))
        images = shown(torch.from_numpy(framed).permute(2, 0, 1))
        count = max(_TOKENS // (weight.numel() + 1), 1)
        for start in range(0, len(regions), count):
            some = regions[start : start + count]
            scores = sum(
                self._similarity(torch.stack([image[(slice(None), *r.slices)] for r in some]))
                for image in images
            )
            for region, own in zip(some, scores / len(images), strict=True):
                where = tuple(slice(s.start // step, s.stop // step) for s in region.slices)
                total[(slice(None), *where)] += own * weight
                weights[where] += weight
                # tiles that disagree about a patch are counted against the first one that saw it
                best, before = own.argmax(0) + 1, first[where]
                again += int((before > 0).sum())
                differ += int(((before > 0) & (before != best)).sum())
                first[where] = torch.where(before > 0, before, best)
        if differ:
            share = 100 * differ / again
            notes += (f"tiles that overlap give {share:.1f} % of their patches different classes.",)
        return TextPage((total / weights).numpy(), step, (pads[0], pads[2]), filled.shape[:2], notes)

    def shrink(self) -> str | None:
        """Need less memory next time: half the tile, then bfloat16, then the CPU.

        Returns:
            What was done, in words; None when nothing is left to try.
        """
        side = self.tile or max(self._tower.size)
        if side // 2 >= _LEAST:
            self.tile = side // 2
            return f"out of memory: the tile was halved to {self.tile} px."
        if self.device != "cpu" and not self._half:
            self._half = True
            return "out of memory: the model runs in bfloat16 now."
        if self.device != "cpu":
            self.device, self._half = "cpu", False
            self._tower.visual.to("cpu")
            return "out of memory: the work goes on on the CPU."
        return None

    @torch.inference_mode()
    def _similarity(self, images: Tensor) -> Tensor:
        """Run (b, 3, h, w) in [0, 1] -> cosine similarity to each text (b, K, rows, columns), on the CPU."""
        batch = ((images - self._mean) / self._std).to(self.device)
        with torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=self._half):
            patches = self._tower(batch)
        cosines = normalize(patches.cpu(), dim=-1) @ self._vectors.T
        if not cosines.isfinite().all():
            raise InputError(f"{self.config.model} gives values that are not finite; check its weights.")
        return cosines.permute(0, 3, 1, 2)


class TextPage:
    """Similarities of one page, piece by piece; made by `TextFeatures.prepare`.

    Args:
        grid: (K, rows, columns) float32, for each patch of the padded page.
        step: patch size in pixels.
        offset: padding at (top, left), in pixels.
        frame: height and width of the page without padding.
        notes: what the user should know.
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

    def compute(self, number: int) -> np.ndarray:
        """Return the similarities (K, rows, columns) float32 at the pixels of a piece: bilinear between patches."""
        rows, columns = self.pieces[number].slices
        both = ((self._rows, rows), (self._columns, columns))
        (top, bottom, down), (left, right, across) = (tuple(part[cut] for part in axis) for axis, cut in both)
        lines = self.grid[:, top] + (self.grid[:, bottom] - self.grid[:, top]) * down[:, None]
        return lines[..., left] + (lines[..., right] - lines[..., left]) * across


def _between(length: int, begin: int, step: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return for each pixel of an axis the patches before and after it, and its share of the way, float32."""
    place = np.clip((np.arange(length) + begin + 0.5) / step - 0.5, 0, count - 1)
    before = np.floor(place).astype(np.int64)
    return before, np.minimum(before + 1, count - 1), (place - before).astype(np.float32)


@torch.inference_mode()
def encode(model: torch.nn.Module, words: object, prompts: Prompts) -> TextClassifier:
    """Turn prompts into one vector for each class: the mean over its sentences, each of unit length.

    Args:
        model: an open_clip model, on the CPU.
        words: its tokenizer.
        prompts: classes and sentences.

    Raises:
        OptionError: a sentence longer than the text tower reads.
    """
    vectors = []
    for sentences in prompts.sentences():
        _check_length(words, sentences)
        each = normalize(model.encode_text(words(sentences)).float(), dim=-1)
        vectors.append(normalize(each.mean(0), dim=-1))
    return TextClassifier(torch.stack(vectors).numpy(), float(model.logit_scale.exp().max()))


def _check_length(words: object, sentences: list[str]) -> None:
    """Raise where the tokenizer would cut a sentence short."""
    split, most = getattr(words, "encode", None), getattr(words, "context_length", None)
    if split is None or most is None:
        return
    for sentence in sentences:
        length = len(split(sentence)) + 2
        if length > most:
            raise OptionError(
                f"the prompt {sentence[:60]!r} has {length} tokens, but the text tower reads {most}; shorten it."
            )
