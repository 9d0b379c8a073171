"""Metrics of the models of `small_retrofit.py`: decodable position, similarity to the teacher, and segmentation.

Position is decoded from the final, normalized features of the patches, on noise and on homogeneous textures that were
not trained on. Similarity to the teacher is measured on synthetic images of another seed and on micrographs;
segmentation on micrographs alone, each by its own scribbles, with filters and the same classifier alongside it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vispe.evaluate.probe.group_averages import effective_rank, mean_cosine
from vispe.evaluate.probe.linear_debiasing import blank_channels
from vispe.images.normalize import normalize
from vispe.images.read import read_image
from vispe.train.data import SyntheticSource
from vispe.train.evaluate.before_after import ModelMeasurements, evaluate
from vispe.train.evaluate.mask_scores import FilterFeatures, finite_mean, score_masks
from vispe.train.evaluate.probe_images import CentreWindows, Settings
from vispe.train.retrofit.student import load_student

SIZES = (96, 192)
"""Sides of images in pixels: that of the teacher, and twice that."""

PATCH, NOISE, TEXTURES = 8, 16, 9
FRAMES = 4
"""Micrographs of each set, the first by name."""

UNSEEN = 12
"""Synthetic images of another seed, for likeness to the teacher."""


def readable(model: nn.Module) -> dict[str, Any]:
    """Return held-out R² of a model alone, by size and kind of images, and its effective rank."""
    report = evaluate(
        model.eval(),
        model,
        settings=settings(),
        img_size=SIZES[0],
        noise=8,
        textures=TEXTURES,
        rotation=False,
    )
    return {
        "r2": report.before.readable,
        **probes(report.before),
        "rank": float(np.median(report.before.rank)),
    }


def measured(folder: Path, micrographs: Path) -> dict[str, Any]:
    """Measure a finished retrofit: position at two sizes, likeness on unseen images, segmentation of micrographs."""
    student, teacher, card = load_student(folder)
    result: dict[str, Any] = {
        "blanked": card["blanked"],
        "width": card["channels"],
        "log": log_of(folder),
        "fingerprint": card["data"]["fingerprint"],
    }
    result |= {
        "config": {k: v for k, v in card["config"].items() if k != "data"},
        "encoding": card["encoding"],
    }
    for size in SIZES:
        report = evaluate(
            teacher.model,
            student.model,
            channels=card["blanked"],
            img_size=size,
            settings=settings(size),
            noise=NOISE,
            textures=TEXTURES,
            rotation=False,
        )
        sides = {"before": report.before, "blanked": report.blanked, "after": report.after}
        result[f"{size} px"] = {
            **{key: {"r2": side.readable, **probes(side)} for key, side in sides.items()},
            "cosine": float(np.mean(report.cosine_blanked)),
            "rank": {key: float(np.median(side.rank)) for key, side in sides.items()},
            "fixed_pattern_snr": {
                key: float(side.fingerprint.snr) for key, side in sides.items() if side.fingerprint
            },
        }
    result["likeness"] = likeness(teacher.model, student.model, card["blanked"], micrographs)
    result["segmentation"] = segmentation(teacher.model, student.model, card["blanked"], micrographs)
    return result | {"criteria": criteria(result)}


def criteria(result: dict[str, Any]) -> dict[str, float | None]:
    """Return the numbers that have limits, at the size of the teacher and on images that were not trained on."""
    own = result[f"{SIZES[0]} px"]
    near = result["likeness"]["synthetic"]
    corner = result["segmentation"]
    return {
        "R² before": own["before"]["r2"],
        "R² after": own["after"]["r2"],
        "blanked": len(result["blanked"]) / result["width"],
        "cosine": near["cosine"],
        "rank": near["rank"],
        "corner": corner["beyond_filters"]["after"] if corner else None,
    }


def probes(side: ModelMeasurements) -> dict[str, Any]:
    """Return of each kind of images the held-out R² of each target, median, and of the shuffled headline."""
    result = {}
    for kind, probe in side.probes.items():
        rows = {row.target: float(np.median(row.r2_heldout)) for row in probe.rows}
        spread = [float(v) for v in np.median(probe.rows[0].r2_heldout, axis=1)]
        result[kind] = rows | {"shuffled": float(np.median(probe.rows[0].shuffled)), "by picture": spread}
    return result


def likeness(
    teacher: nn.Module, student: nn.Module, channels: Sequence[int], micrographs: Path
) -> dict[str, Any]:
    """Return how like the blanked teacher the student is, and effective ranks, on unseen images.

    Of synthetic images, also with the teacher less its positions, `shift_average`: no student without positions can
    be much more like the teacher than that is, and the rank that it lacks was that of the positions. 'constant' is the
    score of features that are the same in all patches of an image.
    """
    known = settings()
    unseen = SyntheticSource(UNSEEN, seed=2_000, side=SIZES[0])
    kinds: dict[str, list[Tensor]] = {"synthetic": [known.normalized(one) for one in unseen]}
    if micrographs.is_dir():
        frames = [frame[0] for _, result in sets_of(micrographs) for frame in result]
        kinds["micrographs"] = list(CentreWindows(frames, PATCH, SIZES[0]))
    report = {}
    for kind, images in kinds.items():
        rows = []
        for image in images:
            own, new = (final_maps(m, image) for m in (teacher, student))
            target = without(own, channels)
            constant = target.mean((1, 2), keepdim=True).expand_as(target)
            row = alike(new, target, "") | {"cosine of constant": mean_cosine(constant, target)}
            row["rank"] = effective_rank(new) / effective_rank(own)
            maps = {"teacher": own, "blanked": target, "student": new}
            if kind == "synthetic":
                placeless = without(shift_average(teacher, image), channels)
                row |= alike(new, placeless, " to placeless") | alike(placeless, target, " of placeless")
                maps["placeless"] = placeless
            rows.append(row | {f"rank {name}": effective_rank(value) for name, value in maps.items()})
        means = {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}
        report[kind] = {"pictures": len(rows), **means}
    return report


def shift_average(model: nn.Module, image: Tensor) -> Tensor:
    """Return maps (d, h, w): mean over all cyclic shifts of an image (3, H, W) by patches, each shifted back."""
    h, w = (n // PATCH for n in image.shape[1:])
    total = torch.zeros(1)
    for row in range(h):
        moved = [image.roll((PATCH * row, PATCH * col), (1, 2)) for col in range(w)]
        maps = features(model, torch.stack(moved))
        total = total + sum(one.roll((-row, -col), (1, 2)) for col, one in enumerate(maps))
    return total / (h * w)


def without(maps: Tensor, channels: Sequence[int]) -> Tensor:
    """Return maps (d, h, w) with some channels at 0."""
    return blank_channels(maps, list(channels), axis=0) if channels else maps


def alike(actual: Tensor, expected: Tensor, what: str) -> dict[str, float]:
    """Return the cosine of maps (d, h, w), and that of what differs between patches, mean over patches."""
    return {
        f"cosine{what}": mean_cosine(actual, expected),
        f"centred cosine{what}": centred(actual, expected),
    }


def centred(actual: Tensor, expected: Tensor) -> float:
    """Return the cosine of maps (d, h, w) less their mean over patches: what all patches share counts for nothing."""
    one, other = (m - m.mean((1, 2), keepdim=True) for m in (actual, expected))
    return float(nn.functional.cosine_similarity(one, other, dim=0).mean())


@torch.no_grad()
def features(model: nn.Module, images: Tensor) -> Tensor:
    """Return the final, normed maps (b, d, h, w) of images (b, 3, H, W)."""
    return model.forward_intermediates(images, indices=1, norm=True, intermediates_only=True)[0]


def final_maps(model: nn.Module, image: Tensor) -> Tensor:
    """Return the final maps (d, h, w) of an image (3, H, W)."""
    return features(model, image[None])[0]


def segmentation(
    teacher: nn.Module, student: nn.Module, channels: Sequence[int], micrographs: Path
) -> dict[str, Any] | None:
    """Return mIoU of each set with scribbles all over a window, and what scribbles in one corner lose."""
    if not micrographs.is_dir():
        return None
    known, size = settings(SIZES[1]), SIZES[1]

    def maps(model: nn.Module, blank: Sequence[int] = ()) -> Callable[[Tensor], Tensor]:
        return lambda images: torch.stack([without(final_maps(model, one), blank) for one in images])

    sources = {"before": maps(teacher), "blanked": maps(teacher, channels), "after": maps(student)}
    sources["filters"] = FilterFeatures(known.mean, known.std)
    own: dict[str, list[float]] = {name: [] for name in sources}
    corner: dict[str, list[float]] = {name: [] for name in sources}
    report: dict[str, Any] = {"size": size, "sets": {}}
    for label, frames in sets_of(micrographs):
        images, truths = zip(*frames, strict=True)
        windows = CentreWindows(images, PATCH, size), CentreWindows(truths, PATCH, size)
        scores = score_masks(sources, *windows, int(max(t.max() for t in truths)))
        for name in sources:
            own[name] += scores.own[name].tolist()
            corner[name] += scores.corner[name].tolist()
        report["sets"][label] = {
            key: {name: finite_mean(values) for name, values in getattr(scores, key).items()}
            for key in ("own", "corner", "others")
        } | {"images": len(images)}
    report["own"] = {name: finite_mean(np.array(v)) for name, v in own.items()}
    report["corner"] = {name: finite_mean(np.array(v)) for name, v in corner.items()}
    report["beyond_filters"] = {
        name: finite_mean(np.array(corner[name]) - np.array(corner["filters"])) for name in sources
    }
    return report


def sets_of(folder: Path) -> Iterator[tuple[str, list[tuple[Tensor, np.ndarray]]]]:
    """Yield name, and images (3, H, W) with labels (H, W) from 1, of each set that has scribbles in a corner."""
    for place in sorted(path.parent for path in folder.glob("*/scribbles_corner")):
        result = []
        for path in sorted((place / "images").glob("*.png"))[:FRAMES]:
            page = torch.from_numpy(normalize(read_image(path))[0][0]).permute(2, 0, 1)
            truth = read_image(place / "masks" / path.name).pages[0][..., 0].astype(np.int64) + 1
            result.append((settings().normalized(page), truth))
        yield place.name, result


def settings(size: int | None = None) -> Settings:
    """Return how images are made for the models: values in [0, 1] become (x - 0.5) * 4."""
    return Settings(PATCH, size or SIZES[0], torch.full((3, 1, 1), 0.5), torch.full((3, 1, 1), 0.25))


def log_of(folder: Path) -> list[list[float]]:
    """Return step, loss, cosine and effective ranks (student, target) of each interval of a training."""
    keys = ("step", "loss", "cosine", "rank_student", "rank_target")
    lines = (folder / "log.jsonl").read_text().splitlines()
    return [[json.loads(line)[key] for key in keys] for line in lines]
