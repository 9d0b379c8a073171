"""What a retrofit measures by itself, on pictures that were not trained on; and which channels reveal position.

Readable position of the teacher, of the teacher without the blanked channels, and of the student are probed with the
same fitted patches. Beside them stand the cosine to what the student learnt and the effective rank: features that
are the same everywhere are not positional either. `vispe retrofit evaluate` measures much more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vispe.backbones.batching import FeatureFunction, features_of
from vispe.backbones.model_access import final_tokens
from vispe.backbones.vision_model import VisionModel
from vispe.evaluate.probe.splits import POSITIONS, Trials
from vispe.train.evaluate.model_pair import SIDES, Pair, likeness
from vispe.train.evaluate.probe_images import Noise, Settings, Textures, probe_step
from vispe.train.retrofit.config import Probe


def feature_maps(model: nn.Module, device: torch.device) -> FeatureFunction:
    """Return the function from images (b, 3, H, W) to final maps (b, d, h, w) on the CPU, without gradients."""

    def maps(images: Tensor) -> Tensor:
        with torch.no_grad():
            return final_tokens(model, images.to(device))[0].float().cpu()

    return maps


def pictures(teacher: VisionModel, probe: Probe, size: int, seed: int) -> dict[str, Sequence[Tensor]]:
    """Return normalised pictures that show no place, (3, side, side) each, by kind: 'noise' and 'textures'.

    Args:
        teacher: whose normalisation is used.
        probe: how many.
        size: of the images of the first stage in pixels.
        seed: of the pictures.
    """
    side = probe.size or size
    settings = Settings(teacher.patch, side, teacher.mean, teacher.std)
    kinds = {"noise": Noise(probe.noise, side, settings, seed)}
    kinds |= {"textures": Textures(probe.textures, side, settings, seed)}
    return {kind: images for kind, images in kinds.items() if len(images)}


def telling_channels(
    teacher: FeatureFunction, kinds: Mapping[str, Sequence[Tensor]], probe: Probe, count: int
) -> list[int]:
    """Return the channels from which the position of a patch is read best, the best first.

    A channel is judged by its best held-out R² over row, column, diagonal, distance to the centre and raster order,
    mean over pictures.

    Args:
        teacher: images -> maps.
        kinds: pictures by kind.
        probe: how it is fitted.
        count: of channels.
    """
    rng, curves = np.random.default_rng(probe.seed), []
    for images in kinds.values():
        for image in images:
            maps = features_of(teacher, image[None])[0].permute(1, 2, 0)
            trials = _trials(probe, maps.shape[0])
            # the first target, row and column together, is the sum of two that are there already
            curves.append(trials.channels(maps, trials.draw(tuple(maps.shape[:2]), rng))[1:])
    # a channel that is constant has no R² and comes last
    best = np.nan_to_num(np.mean(curves, axis=0), nan=-np.inf).max(0)
    return [int(c) for c in np.argsort(-best, kind="stable")[:count]]


def compare(pair: Pair, kinds: Mapping[str, Sequence[Tensor]], probe: Probe) -> dict[str, Any]:
    """Measure teacher, blanked teacher and student on the same pictures with the same fitted patches.

    Args:
        pair: teacher and student.
        kinds: pictures by kind.
        probe: how it is fitted.

    Returns:
        JSON values by kind: for 'before' (teacher), 'blanked' and 'after' (student) the held-out R² of each target and
        of the shuffled headline, median over pictures; 'cosine' of the student to the blanked teacher, and 'rank'
        (effective rank) of all three, means over pictures.
    """
    rng, report = np.random.default_rng(probe.seed), {}
    for kind, images in kinds.items():
        rows, kept = [], []
        for maps in map(pair.maps, images):
            rows.append(_scores(maps, probe, rng))
            kept.append(likeness([maps]))
        medians = {side: np.median([row[side] for row in rows], axis=0) for side in SIDES}
        report[kind] = {
            "pictures": len(images),
            **{
                side: dict(zip((*POSITIONS, "shuffled"), map(_plain, values), strict=True))
                for side, values in medians.items()
            },
            "cosine": _plain(np.mean([one.cosine_blanked for one in kept])),
            "rank": {side: _plain(np.mean([one.rank[side] for one in kept])) for side in SIDES},
        }
    return report


def _scores(maps: Mapping[str, Tensor], probe: Probe, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return the held-out R² of each target and of the shuffled headline, by side."""
    grid = tuple(maps["before"].shape[1:])
    trials = _trials(probe, grid[0])
    # the same patches are fitted on every side, so that sides differ by their features alone
    trial = trials.draw(grid, rng)
    scores = {side: trials.scores(value.permute(1, 2, 0), trial) for side, value in maps.items()}
    return {side: np.append(r2, shuffled[0]) for side, (r2, shuffled) in scores.items()}


def kept_on_data(pair: Pair, images: Iterable[Tensor]) -> dict[str, float | None]:
    """Return cosine to the blanked teacher and effective ranks on images (3, H, W), means over images."""
    kept = likeness(map(pair.maps, images))
    return {
        "images": len(kept.cosine),
        "cosine": _plain(np.mean(kept.cosine_blanked)),
        "rank": _plain(np.mean(kept.rank["after"])),
        "rank_target": _plain(np.mean(kept.rank["blanked"])),
    }


def verdict(report: Mapping[str, Any], data: Mapping[str, Any], blank: int, channels: int) -> str:
    """Return the result in a few lines: readable position before and after, and what was kept.

    Args:
        report: of `compare`.
        data: of `kept_on_data`.
        blank: number of blanked channels.
        channels: number of channels.
    """
    lines = []
    for kind, scores in report.items():
        before, blanked, after = (_number(scores[side]["lr+ud"]) for side in SIDES)
        lines.append(
            f"position read from {kind} (held-out R²: 1 all, 0 or less nothing): {before} before, "
            f"{blanked} with {blank} of {channels} channels blanked, {after} after"
        )
    share = None if not data["rank_target"] else (data["rank"] or 0.0) / data["rank_target"]
    lines.append(
        f"kept on images of the data: cosine {_number(data['cosine'])} to the features that were to be learnt, "
        f"effective rank x {_number(share)}"
    )
    return "\n".join(lines)


def _trials(probe: Probe, patches: int) -> Trials:
    return Trials(POSITIONS, probe.step or probe_step(patches), probe.masks)


def _plain(value: float) -> float | None:
    return round(float(value), 6) if np.isfinite(value) else None


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"
