"""Where in a network position can be read: the linear probe after every block, and of every channel of it.

The first line of the curve are the pixels of the patches themselves: what they tell, the picture tells, and a network
that tells as much has no need of a position code. The probe is that of `vispe.evaluate.probe.positional`.

Memory: the maps of all blocks for one image, and the mean of the channel curves.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vispe.backbones.batching import checked_maps
from vispe.backbones.vision_model import ModelFeatures
from vispe.errors import ShapeError
from vispe.evaluate.probe.feature_sources import check_images, patch_pixels
from vispe.evaluate.probe.fit import Features, Fit, Regressor, to_numpy
from vispe.evaluate.probe.splits import POSITIONS, Trials, cell
from vispe.report.table import aligned, json_entries, json_list


@dataclass(frozen=True)
class LayerProbe:
    """What the probe found after every block.

    Attributes:
        targets: names, the headline first.
        r2: held-out R², mean over masks, (blocks, targets, images).
        shuffled: the same with the patches of the target in random order, the control.
        pixels: the same of the pixels of the patches instead of features, (targets, images); None where they are
            not known.
        channel_r2: for every block the held-out R² of each channel alone, (targets, C), mean over images and masks.
        grids: patches (h, w) after every block, for the first image.
        settings: what the numbers depend on.
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
        """One sentence on where position can be read."""
        curve = self.curve
        if np.isnan(curve).any():
            return f"cannot be judged: {self.targets[0]} is constant on a grid {self.grids[0]}"
        best, last = int(curve.argmax()), len(curve) - 1
        if curve[best] < 0.1:
            return (
                f"no linear position after any of {len(curve)} blocks: held-out R² {curve[best]:.2f} at most"
            )
        first = int(np.flatnonzero(curve >= max(0.1, curve[best] / 2))[0])
        parts = [f"position can be read from block {first} on (held-out R² {curve[first]:.2f})"]
        if best not in (first, last):
            parts.append(f"best after block {best} ({curve[best]:.2f})")
        if first != last:
            parts.append(f"{curve[last]:.2f} after the last, block {last}")
        return ", ".join(parts)

    @property
    def notes(self) -> tuple[str, ...]:
        """What weakens the verdict, one sentence each."""
        notes = []
        if (control := np.median(self.shuffled[:, 0], axis=1)).max() > 0.1:
            notes.append(
                f"Shuffled positions were read too, after block {int(control.argmax())}, so these scores mean nothing."
            )
        if self.pixels is not None and (seen := float(np.median(self.pixels[0]))) > 0.1:
            notes.append(
                f"The pixels alone tell the place (R² {seen:.2f}), so part of the scores is due to the pictures: "
                "probe noise or homogeneous textures too."
            )
        return tuple(notes)

    def top_channels(self, block: int = -1, target: str | None = None, n: int = 6) -> list[int]:
        """Return the channels of a block that tell most of a target (default the headline), best first."""
        curve = self.channel_r2[block][self.targets.index(target or self.targets[0])]
        return [int(c) for c in np.argsort(-curve, kind="stable")[:n]]

    def table(self) -> list[list[str]]:
        """Return the table of median R² as text, heads first: a line for the pixels, then one for each block."""
        rows = [["after", *self.targets, "shuffled", "telling channels"]]
        if self.pixels is not None:
            rows.append(["pixels", *map(cell, np.median(self.pixels, axis=1)), "", ""])
        for k, (r2, control) in enumerate(zip(self.r2, self.shuffled, strict=True)):
            cells = map(cell, (*np.median(r2, axis=1), np.median(control[0])))
            best = [f"{c} ({cell(self.channel_r2[k][0][c])})" for c in self.top_channels(k, n=3)]
            rows.append([f"block {k}", *cells, ", ".join(best)])
        return rows

    def to_markdown(self) -> str:
        """Return `table` as Markdown, its columns aligned."""
        return aligned(self.table(), left=(0, len(self.targets) + 2))

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values: every score by block, target and image; the channel curves by block and target."""

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
    model: nn.Module | ModelFeatures | Iterable[Sequence[Features]],
    images: Iterable[Tensor] | None = None,
    *,
    targets: Sequence[str] = POSITIONS,
    step: int = 6,
    masks_per_image: int = 6,
    regressor: Regressor = "ridge",
    alpha: float = 1.0,
    generator: np.random.Generator | int = 0,
) -> LayerProbe:
    """Measure how well position is read from the patches after every block, and from every channel there.

    Blocks are taken without the model's final norm. The same patches are fitted after every block with the same grid,
    so that blocks differ by nothing else. One forward pass for each image.

    Args:
        model: a model of timm or open_clip, converted or not, in evaluation mode; or, for each image, its features
            (h, w, C) after every block.
        images: (3, H, W) each, normalised, sides multiples of the patch; None with features.
        targets: names of `vispe.evaluate.probe.targets.ramp`, the headline first.
        step: one patch in step² is fitted.
        masks_per_image: random choices of these patches for each image.
        regressor: `ridge`, or `linear` for least squares of least norm.
        alpha: penalty of ridge.
        generator: a numpy Generator, or a seed for one; draws masks and the order of the shuffled control.

    Raises:
        ShapeError: no images, images with different numbers of blocks or channels, or too few patches for the step.
        OptionError: features and images, or a model without images; an unknown target.

    >>> blocks = np.random.default_rng(0).normal(size=(2, 12, 12, 8))
    >>> probe_layers([blocks], step=2).r2.shape
    (2, 6, 1)
    """
    rng = np.random.default_rng(generator)
    trials = Trials(tuple(dict.fromkeys(targets)), step, masks_per_image, Fit(regressor, alpha))
    scores, controls, pixels, grids, n = [], [], [], [], 0
    curves: list[np.ndarray] = []
    for maps, raw in _each(model, images):
        drawn = {}
        for m in [*maps, *([] if raw is None else [raw])]:
            if m.shape[:2] not in drawn:
                drawn[m.shape[:2]] = trials.draw(m.shape[:2], rng)
        r2, control = zip(*(trials.scores(m, drawn[m.shape[:2]]) for m in maps), strict=True)
        single = [trials.channels(m, drawn[m.shape[:2]]) for m in maps]
        if n and [c.shape for c in single] != [c.shape for c in curves]:
            raise ShapeError(
                f"Image {n} has features of the widths {[c.shape[1] for c in single]} after its blocks, and the first "
                f"image {[c.shape[1] for c in curves]}; probe one model at a time."
            )
        n += 1
        curves = [c + (s - c) / n for c, s in zip(curves, single, strict=True)] if n > 1 else single
        scores.append(r2)
        controls.append(control)
        if raw is not None:
            pixels.append(trials.scores(raw, drawn[raw.shape[:2]])[0])
        grids = grids or [(int(m.shape[0]), int(m.shape[1])) for m in maps]
    if not n:
        raise ShapeError("The probe got no images; give at least one.")
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
    source: nn.Module | ModelFeatures | Iterable[Sequence[Features]], images: Iterable[Tensor] | None
) -> Iterator[tuple[list[np.ndarray], np.ndarray | None]]:
    """Yield the features (h, w, C) after every block, and the pixels of the patches, of one image after another."""
    features = not isinstance(source, nn.Module | ModelFeatures)
    check_images(features, images)
    if features:
        yield from (([to_numpy(m) for m in maps], None) for maps in source)
        return
    f = source if isinstance(source, ModelFeatures) else ModelFeatures(source)
    for image in images:
        with torch.no_grad():
            maps = [checked_maps(m, 1)[0].permute(1, 2, 0) for m in f.layers(image[None])]
        raw = None if f.patch is None else to_numpy(patch_pixels(image, f.patch))
        yield [to_numpy(m) for m in maps], raw
