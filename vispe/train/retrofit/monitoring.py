"""Measurements of a retrofit at the end of training, and selection of position-dependent channels.

Decodable position of the teacher, the ablated teacher and the student is probed with the same fitted patches, on images
that are not used for training. Cosine to the target and effective rank detect a collapse to constant features. See
`vispe retrofit evaluate` for the complete evaluation.
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
from vispe.errors import counted
from vispe.evaluate.probe.splits import POSITIONS, Trials
from vispe.train.evaluate.model_pair import SIDES, ModelPair, feature_similarity
from vispe.train.evaluate.probe_images import Noise, Settings, Textures, probe_step
from vispe.train.retrofit.config import Probe


def feature_maps(model: nn.Module, device: torch.device) -> FeatureFunction:
    """Return a function from images (b, 3, H, W) to final maps (b, d, h, w) on the CPU, without gradients."""

    def maps(images: Tensor) -> Tensor:
        with torch.no_grad():
            return final_tokens(model, images.to(device))[0].float().cpu()

    return maps


def probe_images(teacher: VisionModel, probe: Probe, size: int, seed: int) -> dict[str, Sequence[Tensor]]:
    """Return normalised images without positional cue, (3, side, side) each, by kind: 'noise' and 'textures'.

    Args:
        teacher: model whose normalisation is used.
        probe: numbers and size of the images.
        size: default size in pixels, that of the first stage.
        seed: seed of the images.
    """
    side = probe.img_size or size
    settings = Settings(teacher.patch_size, side, teacher.mean, teacher.std)
    kinds = {"noise": Noise(probe.noise, side, settings, seed)}
    kinds |= {"textures": Textures(probe.textures, side, settings, seed)}
    return {kind: images for kind, images in kinds.items() if len(images)}


def position_channels(
    teacher: FeatureFunction, kinds: Mapping[str, Sequence[Tensor]], probe: Probe, count: int
) -> list[int]:
    """Return the channels from which the position of a patch is decoded best, in descending order.

    The score of a channel is its best held-out R² over row, column, diagonal, distance to the centre and raster order,
    averaged over images.

    Args:
        teacher: function from images to maps.
        kinds: probe images by kind.
        probe: settings of the probe.
        count: number of channels.
    """
    rng, curves = np.random.default_rng(probe.seed), []
    for images in kinds.values():
        for image in images:
            maps = features_of(teacher, image[None])[0].permute(1, 2, 0)
            trials = _trials(probe, maps.shape[0])
            # skip the first target, row and column together, which consists of two other targets
            curves.append(trials.channels(maps, trials.draw(tuple(maps.shape[:2]), rng))[1:])
    # constant channels have no R² and are sorted last
    best = np.nan_to_num(np.mean(curves, axis=0), nan=-np.inf).max(0)
    return [int(c) for c in np.argsort(-best, kind="stable")[:count]]


def compare(pair: ModelPair, kinds: Mapping[str, Sequence[Tensor]], probe: Probe) -> dict[str, Any]:
    """Probe teacher, ablated teacher and student on the same images with the same fitted patches.

    Args:
        pair: teacher and student.
        kinds: probe images by kind.
        probe: settings of the probe.

    Returns:
        JSON values by kind: for 'before' (teacher), 'blanked' and 'after' (student) the held-out R² of each target and
        of the shuffled headline, median over images; 'cosine' of student and ablated teacher, and 'rank' (effective
        rank) of all three, means over images.
    """
    rng, report = np.random.default_rng(probe.seed), {}
    for kind, images in kinds.items():
        scores, similarities = [], []
        for maps in map(pair.maps, images):
            scores.append(_scores(maps, probe, rng))
            similarities.append(feature_similarity([maps]))
        medians = {side: np.median([row[side] for row in scores], axis=0) for side in SIDES}
        report[kind] = {
            "pictures": len(images),
            **{
                side: dict(zip((*POSITIONS, "shuffled"), map(_plain, values), strict=True))
                for side, values in medians.items()
            },
            "cosine": _plain(np.mean([similarity.cosine_blanked for similarity in similarities])),
            "rank": {
                side: _plain(np.mean([similarity.rank[side] for similarity in similarities]))
                for side in SIDES
            },
        }
    return report


def _scores(maps: Mapping[str, Tensor], probe: Probe, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return the held-out R² of each target and of the shuffled headline, for each of `SIDES`."""
    grid = tuple(maps["before"].shape[1:])
    trials = _trials(probe, grid[0])
    # the same patches are fitted for all models, so that only the features differ
    trial = trials.draw(grid, rng)
    scores = {side: trials.scores(value.permute(1, 2, 0), trial) for side, value in maps.items()}
    return {side: np.append(r2, shuffled[0]) for side, (r2, shuffled) in scores.items()}


def similarity_on_data(pair: ModelPair, images: Iterable[Tensor]) -> dict[str, float | None]:
    """Return cosine to the ablated teacher and effective ranks on images (3, H, W), means over images."""
    similarity = feature_similarity(map(pair.maps, images))
    return {
        "images": len(similarity.cosine),
        "cosine": _plain(np.mean(similarity.cosine_blanked)),
        "rank": _plain(np.mean(similarity.rank["after"])),
        "rank_target": _plain(np.mean(similarity.rank["blanked"])),
    }


def verdict(report: Mapping[str, Any], data: Mapping[str, Any], blank: int, channels: int) -> str:
    """Return the result in a few lines: decodable position before and after, and similarity to the target.

    Args:
        report: result of `compare`.
        data: result of `similarity_on_data`.
        blank: number of ablated channels.
        channels: number of channels.
    """
    lines = []
    for kind, scores in report.items():
        before, blanked, after = (_number(scores[side]["lr+ud"]) for side in SIDES)
        lines.append(
            f"position decoded from {kind} (held-out R²; 1: perfectly, 0 or less: not at all): {before} before, "
            f"{blanked} with {blank} of {counted(channels, 'channel')} ablated, {after} after"
        )
    rank_ratio = None if not data["rank_target"] else (data["rank"] or 0.0) / data["rank_target"]
    lines.append(
        f"similarity on training images: cosine {_number(data['cosine'])} to the target, "
        f"effective rank x {_number(rank_ratio)}"
    )
    return "\n".join(lines)


def _trials(probe: Probe, patches: int) -> Trials:
    return Trials(POSITIONS, probe.step or probe_step(patches), probe.masks)


def _plain(value: float) -> float | None:
    return round(float(value), 6) if np.isfinite(value) else None


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"
