"""Linear probe of position after every block of a network, and for every channel.

The first point of the curve is the probe of the pixels of the patches, which measures position revealed by the image
itself. The probe is that of `vispe.evaluate.probe.positional` (dino-saw, arXiv 2603.16840).

Memory: the maps of all blocks for one image, and the mean of the channel curves.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vispe.backbones.batching import checked_maps
from vispe.backbones.vision_model import VisionModel
from vispe.errors import ShapeError, counted
from vispe.evaluate.probe.feature_sources import check_images, patch_pixels
from vispe.evaluate.probe.regression_data import Features, Fit, Regressor, to_numpy
from vispe.evaluate.probe.splits import POSITIONS, Trials, cell
from vispe.utils.report.result import Result
from vispe.utils.report.table import json_entries, json_list


@dataclass(frozen=True)
class LayerProbe(Result):
    """Result of the probe after every block.

    Attributes:
        targets: names, the headline first.
        r2: held-out R², mean over masks, (blocks, targets, images).
        shuffled: held-out R² for targets with shuffled patches, the control.
        pixels: the same for the pixels of the patches instead of features, (targets, images); None if unknown.
        channel_r2: for every block the held-out R² of single channels, (targets, C), mean over images and masks.
        grids: patches (h, w) after every block, for the first image.
        settings: options that affect the numbers.
    """

    targets: tuple[str, ...]
    r2: np.ndarray
    shuffled: np.ndarray
    pixels: np.ndarray | None
    channel_r2: tuple[np.ndarray, ...]
    grids: tuple[tuple[int, int], ...]
    settings: dict[str, Any]

    @property
    def curve(self) -> np.ndarray:
        """Median over images of the headline's R² after every block, (blocks,)."""
        return np.median(self.r2[:, 0], axis=1)

    @property
    def verdict(self) -> str:
        """Verdict in one sentence: after which blocks position can be read."""
        curve = self.curve
        if np.isnan(curve).any():
            return f"cannot be judged: {self.targets[0]} is constant on a grid {self.grids[0]}"
        best, last = int(curve.argmax()), len(curve) - 1
        if curve[best] < 0.1:
            blocks = counted(len(curve), "block")
            return f"no linear position after any of {blocks}: held-out R² at most {curve[best]:.2f}"
        first = int(np.flatnonzero(curve >= max(0.1, curve[best] / 2))[0])
        parts = [f"position can be read from block {first} on (held-out R² {curve[first]:.2f})"]
        if best not in (first, last):
            parts.append(f"best after block {best} ({curve[best]:.2f})")
        if first != last:
            parts.append(f"{curve[last]:.2f} after the last, block {last}")
        return ", ".join(parts)

    @property
    def notes(self) -> tuple[str, ...]:
        """Caveats of the verdict, one sentence each."""
        notes = []
        if (control := np.median(self.shuffled[:, 0], axis=1)).max() > 0.1:
            notes.append(
                f"Shuffled positions can be read too, after block {int(control.argmax())}, so the scores are invalid."
            )
        if self.pixels is not None and (r2 := float(np.median(self.pixels[0]))) > 0.1:
            notes.append(
                f"The pixels alone reveal the position (R² {r2:.2f}), so part of the scores is due to the images: "
                "probe noise or homogeneous textures as well."
            )
        return tuple(notes)

    def top_channels(self, block: int = -1, target: str | None = None, n: int = 6) -> list[int]:
        """Return the channels of a block with the highest R² for a target (default the headline), best first."""
        curve = self.channel_r2[block][self.targets.index(target or self.targets[0])]
        return [int(c) for c in np.argsort(-curve, kind="stable")[:n]]

    def table(self) -> list[list[str]]:
        """Return the table of median R² as text, header first: a row for the pixels, then one per block."""
        rows = [["after", *self.targets, "shuffled", "telling channels"]]
        if self.pixels is not None:
            rows.append(["pixels", *map(cell, np.median(self.pixels, axis=1)), "", ""])
        for k, (r2, control) in enumerate(zip(self.r2, self.shuffled, strict=True)):
            cells = map(cell, (*np.median(r2, axis=1), np.median(control[0])))
            best = [f"{c} ({cell(self.channel_r2[k][0][c])})" for c in self.top_channels(k, n=3)]
            rows.append([f"block {k}", *cells, ", ".join(best)])
        return rows

    @property
    def left(self) -> tuple[int, int]:
        """Left-aligned columns of the table: block and channels."""
        return 0, len(self.targets) + 2

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values: all scores by block, target and image, and channel curves by block and target."""

        def by_target(values: np.ndarray) -> dict[str, Any]:
            return dict(zip(self.targets, json_list(values), strict=True))

        return {
            **json_entries(self, "verdict", "notes", "targets", "grids", "settings"),
            "pixels": None if self.pixels is None else by_target(self.pixels),
            "blocks": [
                {
                    "r2_heldout": by_target(r2),
                    "shuffled": by_target(control),
                    "channel_r2": by_target(np.round(curves, 4)),
                }
                for r2, control, curves in zip(self.r2, self.shuffled, self.channel_r2, strict=True)
            ],
        }


def probe_layers(
    model: nn.Module | VisionModel | Iterable[Sequence[Features]],
    images: Iterable[Tensor] | None = None,
    *,
    targets: Sequence[str] = POSITIONS,
    step: int = 6,
    masks_per_image: int = 6,
    regressor: Regressor = "ridge",
    alpha: float = 1.0,
    generator: np.random.Generator | int = 0,
) -> LayerProbe:
    """Probe the position after every block of a model, and in every channel.

    Blocks are evaluated without the final norm. Blocks with equal grids use the same training patches, so that they are
    comparable. One forward pass per image.

    Args:
        model: a model of timm or open_clip, converted or not, in evaluation mode; or, for each image, the features
            (h, w, C) after every block.
        images: (3, H, W) each, normalised, sides multiples of the patch size; None with features.
        targets: names of `vispe.evaluate.probe.targets.ramp`, the headline first.
        step: a fraction 1 / step² of the patches is used for training.
        masks_per_image: number of random training masks per image.
        regressor: `ridge`, or `linear` for min-norm least squares.
        alpha: ridge penalty.
        generator: a NumPy Generator, or a seed; used for masks and for the shuffled control.

    Raises:
        ShapeError: there are no images, numbers of blocks or channels differ between images, or there are too
            few patches for the step.
        OptionError: `images` is set for precomputed features or missing for a model, or a target is unknown.

    >>> blocks = np.random.default_rng(0).normal(size=(2, 12, 12, 8))
    >>> probe_layers([blocks], step=2).r2.shape
    (2, 6, 1)
    """
    rng = np.random.default_rng(generator)
    trials = Trials(tuple(dict.fromkeys(targets)), step, masks_per_image, Fit(regressor, alpha))
    scores, controls, pixels, grids, n = [], [], [], [], 0
    curves: list[np.ndarray] = []
    for maps, raw in _each(model, images):
        masks = {}
        for m in [*maps, *([] if raw is None else [raw])]:
            if m.shape[:2] not in masks:
                masks[m.shape[:2]] = trials.draw(m.shape[:2], rng)
        r2, control = zip(*(trials.scores(m, masks[m.shape[:2]]) for m in maps), strict=True)
        single = [trials.channels(m, masks[m.shape[:2]]) for m in maps]
        if n and [c.shape for c in single] != [c.shape for c in curves]:
            raise ShapeError(
                f"probe_layers: images must have equal channels per block, got {[c.shape[1] for c in single]} for "
                f"image {n} after {[c.shape[1] for c in curves]}. Probe one model at a time."
            )
        n += 1
        curves = [c + (s - c) / n for c, s in zip(curves, single, strict=True)] if n > 1 else single
        scores.append(r2)
        controls.append(control)
        if raw is not None:
            pixels.append(trials.scores(raw, masks[raw.shape[:2]])[0])
        grids = grids or [(int(m.shape[0]), int(m.shape[1])) for m in maps]
    if not n:
        raise ShapeError("probe_layers: no images, got an empty sequence. Pass at least one image.")
    return LayerProbe(
        targets=trials.targets,
        r2=np.moveaxis(np.array(scores), 0, -1),
        shuffled=np.moveaxis(np.array(controls), 0, -1),
        pixels=np.array(pixels).T if pixels else None,
        channel_r2=tuple(curves),
        grids=tuple(grids),
        settings=trials.to_dict(),
    )


def _each(
    source: nn.Module | VisionModel | Iterable[Sequence[Features]], images: Iterable[Tensor] | None
) -> Iterator[tuple[list[np.ndarray], np.ndarray | None]]:
    """Yield for each image the features (h, w, C) after every block, and the pixels of the patches."""
    features = not isinstance(source, nn.Module | VisionModel)
    check_images(features, images)
    if features:
        yield from (([to_numpy(m) for m in maps], None) for maps in source)
        return
    f = source if isinstance(source, VisionModel) else VisionModel(source)
    for image in images:
        with torch.no_grad():
            maps = [checked_maps(m, 1)[0].permute(1, 2, 0) for m in f.layers(image[None])]
        raw = None if f.patch_size is None else to_numpy(patch_pixels(image, f.patch_size))
        yield [to_numpy(m) for m in maps], raw
