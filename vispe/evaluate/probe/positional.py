"""The positional linear probe: how well a linear model reads a patch's position from its features.

The features of ONE image are split into a few sampled patches, on which ridge regression learns a ramp over
the grid, and the rest. A high R² means that the features carry position whatever the image shows; about 0 or
below means that they do not. R² over the patches that were not sampled (`r2_heldout`) is the honest score and
the one that reports lead with; R² over all patches (`r2`) is what published tables show. Two controls show that
the probe is sound: the target `random`, and every target with the patches shuffled; both must not be readable.

`vispe.evaluate.probe.layer_probe` asks the same after every block, `vispe.evaluate.probe.baselines` after remedies.

Source: the probe of dino-saw (tldr-group, arXiv 2603.16840).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from vispe.errors import OptionError, ShapeError
from vispe.evaluate.probe.feature_sources import Source, each_features
from vispe.evaluate.probe.fit import Fit, Regressor, channel_r2, fit_probe
from vispe.evaluate.probe.splits import check_sampled, follower, mixed, same_region
from vispe.evaluate.probe.targets import TARGETS, check_target, ramp, sample_mask
from vispe.report.table import aligned, json_entries, json_list


@dataclass(frozen=True)
class ProbeRow:
    """The scores of one target over images x masks.

    Attributes:
        target: name of the target.
        r2: R² over all patches, (images, masks).
        r2_heldout: R² over the patches that were not sampled, (images, masks).
        shuffled: the same when the target's patches are in random order, the control, (images, masks).
    """

    target: str
    r2: np.ndarray
    r2_heldout: np.ndarray
    shuffled: np.ndarray

    def to_dict(self) -> dict[str, Any]:
        """Return target, mean, median and standard deviation of the scores, and every value, by image and mask."""
        entries: dict[str, Any] = {"target": self.target}
        for key in ("r2_heldout", "r2", "shuffled"):
            values = getattr(self, key)
            mean, median, std = json_list([np.mean(values), np.median(values), np.std(values)])
            entries[key] = {"mean": mean, "median": median, "std": std, "per_image": json_list(values)}
        return entries


@dataclass(frozen=True)
class ProbeResult:
    """What the probe found for one model or feature set.

    Attributes:
        rows: scores by target, the headline target first, `random` last.
        grid: patches (h, w) of the first image.
        n_images: number of images.
        n_samples: patches that each fit of the headline target saw, for the first image.
        n_nan: feature values that were NaN and counted as 0, over all images.
        channel_r2: held-out R² of each channel alone for the headline target, mean over images and masks,
            (C,).
        settings: the arguments that the numbers depend on.
        example: headline ramp, mask and prediction of the first image and mask, for drawing.
    """

    rows: tuple[ProbeRow, ...]
    grid: tuple[int, int]
    n_images: int
    n_samples: int
    n_nan: int
    channel_r2: np.ndarray
    settings: dict[str, Any]
    example: dict[str, np.ndarray] = field(repr=False)

    @property
    def headline(self) -> float:
        """Median held-out R² of the first target."""
        return float(np.median(self.rows[0].r2_heldout))

    @property
    def verdict(self) -> str:
        """One sentence on what the headline number means."""
        score = f"held-out R² {self.headline:.2f}"
        if np.isnan(self.headline):
            return (
                f"cannot be judged: {self.rows[0].target} is constant on a {self.grid[0]}x{self.grid[1]} grid"
            )
        if self.headline >= 0.5:
            return f"position can be read: {score}"
        if self.headline >= 0.1:
            return f"position can partly be read: {score}"
        return f"no linear position: {score}"

    @property
    def notes(self) -> tuple[str, ...]:
        """What weakens the verdict, one sentence each."""
        notes = []
        if self.n_samples < 16:
            notes.append(
                f"Only {self.n_samples} patches were fitted: weak; use larger images or a smaller step."
            )
        if np.median(self.rows[-1].r2_heldout) > 0.1:
            notes.append("Random noise was read too, so these scores mean nothing.")
        if np.median(self.rows[0].shuffled) > 0.1:
            notes.append("Shuffled positions were read too, so these scores mean nothing.")
        if self.n_nan:
            notes.append(f"{self.n_nan} feature values were NaN and counted as 0.")
        return tuple(notes)

    def top_channels(self, n: int = 6) -> list[int]:
        """Return the `n` channels that reveal most of the headline target, best first."""
        return [int(c) for c in np.argsort(-self.channel_r2, kind="stable")[:n]]

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the example as JSON values; NaN becomes `None`."""
        facts = json_entries(
            self, "verdict", "notes", "rows", "grid", "n_images", "n_samples", "n_nan", "settings"
        )
        return facts | {"top_channels": self.top_channels(), "channel_r2": json_list(self.channel_r2)}

    def to_markdown(self) -> str:
        """Return the table of scores as Markdown, its columns aligned."""
        return aligned(self.table())

    def table(self) -> list[list[str]]:
        """Return the table of scores as text, heads first."""
        table = [["target", "held-out R² mean", "median", "std", "all patches R² mean", "median", "std"]]
        table[0].append("shuffled mean")
        for row in self.rows:
            cells = [f(v) for v in (row.r2_heldout, row.r2) for f in (np.mean, np.median, np.std)]
            table.append([row.target, *(f"{value:.3f}" for value in (*cells, np.mean(row.shuffled)))])
        return table


def positional_probe(
    model_or_features: Source,
    images: Tensor | Iterable[Tensor] | None = None,
    *,
    targets: Sequence[str] = TARGETS,
    step: int = 6,
    cutoff: float = 1.0,
    random_mask: bool = True,
    masks_per_image: int = 6,
    regressor: Regressor = "ridge",
    alpha: float = 1.0,
    standardize: bool = True,
    generator: np.random.Generator | int = 0,
) -> ProbeResult:
    """Measure how well position is read, linearly, from the patch features of a model.

    The defaults are the settings of the published tables. Each image is probed on its own; targets that
    sample the same region share the mask and the factorisation.

    Args:
        model_or_features: a model of timm or open_clip (converted or not); or a function from images (b, c, H, W)
            to maps (b, C, h, w); or features (h, w, C) of each image, or (b, h, w, C).
        images: normalised images (b, 3, H, W), or (3, H, W) one by one, for a model; `None` with features.
        targets: the first is the headline; `random`, the sanity check, is added and comes last.
        step: one patch in step² is used for the fit.
        cutoff: share of each side of the grid that is sampled.
        random_mask: draw the patches at random, else take the regular grid (then one mask per image is
            enough).
        masks_per_image: masks drawn for each image.
        regressor: `ridge`, or `linear` for least squares of least norm.
        alpha: penalty of ridge.
        standardize: scale each channel by the mean and deviation of the fitted patches.
        generator: a numpy Generator, or a seed for one; draws masks and the random target. The order of the
            shuffled control follows from it without advancing it.

    Raises:
        ShapeError: no images, or a grid so small that the step leaves no patch to fit on.
        OptionError: unknown target, or images without a model.

    >>> noise = np.random.default_rng(0).normal(size=(12, 12, 8))
    >>> positional_probe([noise], targets=["lr"], step=2).verdict.split(":")[0]
    'no linear position'
    """
    rng = np.random.default_rng(generator)
    # the control has draws of its own, so that masks are those of the published code
    order = follower(rng)
    names = [*(name for name in dict.fromkeys(targets) if name != "random"), "random"]
    for name in names:
        check_target(name)
    if masks_per_image < 1:
        raise OptionError(
            f"The probe needs at least one mask per image, got masks_per_image={masks_per_image}."
        )
    draws = masks_per_image if random_mask else 1
    fit = Fit(regressor, alpha, standardize)
    sampling = {"step": step, "cutoff": cutoff, "random_mask": random_mask, "masks_per_image": draws}
    scores: dict[str, list[list[tuple[float, float, float]]]] = {name: [] for name in names}
    curves, first, n_nan = [], {}, 0
    for feats in each_features(model_or_features, images):
        shape = feats.shape[:2]
        for name in names:
            scores[name].append([])
        for draw in range(draws):
            values = {name: ramp(name, shape, rng) for name in names}
            for group in same_region(names, shape, cutoff):
                mask = sample_mask(
                    group[0], shape, step=step, cutoff=cutoff, random=random_mask, generator=rng
                )
                check_sampled(mask, step, cutoff)
                asked = {name: values[name] for name in group}
                control = {f"shuffled {name}": v for name, v in mixed(asked, order).items()}
                fits = fit_probe(feats, mask, asked | control, fit)
                for name in group:
                    one, shuffled = fits[name], fits[f"shuffled {name}"]
                    scores[name][-1].append((one.r2, one.r2_heldout, shuffled.r2_heldout))
                if names[0] in group:
                    n_nan += fits[names[0]].n_nan if draw == 0 else 0
                    curves.append(channel_r2(feats, mask, values[names[0]], fit, held_out=True))
                    shown = {"ramp": values[names[0]], "mask": mask, "prediction": fits[names[0]].prediction}
                    first = first or shown
    if not curves:
        raise ShapeError("The probe got no images; give at least one.")
    if len({len(curve) for curve in curves}) > 1:
        raise ShapeError("The images have features of different widths; probe one model at a time.")
    arrays = {name: np.array(values) for name, values in scores.items()}
    return ProbeResult(
        rows=tuple(ProbeRow(name, *np.moveaxis(arrays[name], -1, 0)) for name in names),
        grid=first["mask"].shape,
        n_images=len(arrays[names[0]]),
        n_samples=int(first["mask"].sum()),
        n_nan=n_nan,
        channel_r2=np.mean(curves, axis=0),
        settings=sampling | {"regressor": regressor, "alpha": alpha, "standardize": standardize},
        example=first,
    )
