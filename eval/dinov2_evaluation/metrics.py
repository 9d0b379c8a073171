"""Metrics of teacher, blanked teacher and student: decodable position, similarity, equivariance error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from small_retrofit_metrics import centred
from torch import Tensor
from torch.nn.functional import avg_pool2d

from dinov2_evaluation.probe_images import PLACELESS, Extent
from vispe.evaluate.probe.group_averages import effective_rank, mean_cosine
from vispe.evaluate.probe.positional import ProbeResult, positional_probe
from vispe.evaluate.rotation.metrics.equivariance import equivariance
from vispe.evaluate.rotation.record_key import D4_MEAN, FULL
from vispe.train.evaluate.mask_scores import FilterFeatures
from vispe.train.evaluate.model_pair import SIDES, ModelPair, feature_similarity
from vispe.train.evaluate.probe_images import Settings, probe_step


def looked_at(
    pair: ModelPair, kind: str, size: int, images: Sequence[Tensor], settings: Settings, extent: Extent
) -> dict[str, Any]:
    """Return readable position, where the kind shows no position, and likeness; each image runs through once.

    Returns:
        Of each side the held-out R² of every target, median over images and masks, of the shuffled headline, and of
        the headline by image. 'filters': the same of classical filters, averaged over patches: what images
        themselves show of positions. Cosines and effective ranks by image: 'cosine_centred' is that of maps less their
        mean over patches, 'cosine_constant' what features would reach that are the same in all patches, and
        'rank_placeless' the rank of the blanked teacher's maps without what a position has in all images.
    """
    maps = [pair.maps(image) for image in images]
    row: dict[str, Any] = {"pictures": len(maps), "grids": sorted({m["after"].shape[1:] for m in maps})}
    if kind in PLACELESS:
        how = {"step": probe_step(size // settings.patch_size), "masks_per_image": extent.masks}
        filters = FilterFeatures(settings.mean, settings.std)
        pooled = [avg_pool2d(filters(image[None]), settings.patch_size)[0].double() for image in images]
        sides = {side: [m[side] for m in maps] for side in SIDES} | {"filters": pooled}
        row["probe_step"] = how["step"]
        row["r2"] = {
            side: readable(positional_probe([m.permute(1, 2, 0).numpy() for m in own], **how))
            for side, own in sides.items()
        }
    similarity = feature_similarity(maps)
    row |= {"cosine": similarity.cosine.tolist(), "cosine_blanked": similarity.cosine_blanked.tolist()}
    row["cosine_centred"] = [centred(m["after"], m["blanked"]) for m in maps]
    row["cosine_constant"] = [mean_cosine(constant(m["blanked"]), m["blanked"]) for m in maps]
    row["rank_placeless"] = [effective_rank(m) for m in placeless([m["blanked"] for m in maps])]
    return row | {"rank": {side: values.tolist() for side, values in similarity.rank.items()}}


def placeless(maps: Sequence[Tensor], degree: int = 5) -> list[Tensor]:
    """Return maps (d, h, w) minus the part that depends only on the position, which a retrofit should remove.

    It is the mean over maps of one shape, less its mean over patches, as far as polynomials of row and column up to
    `degree` describe it, so that the content of few images does not count as position.
    """
    result = {m.shape: [other for other in maps if other.shape == m.shape] for m in maps}
    shared = {shape: _smooth(torch.stack(own).mean(0), degree) for shape, own in result.items()}
    return [m - shared[m.shape] for m in maps]


def _smooth(mean: Tensor, degree: int) -> Tensor:
    d, h, w = mean.shape
    y, x = torch.meshgrid(*(torch.linspace(-1, 1, n, dtype=torch.float64) for n in (h, w)), indexing="ij")
    powers = [(a, b) for a in range(degree + 1) for b in range(degree + 1 - a) if a + b]
    basis = torch.stack([(y**a * x**b).flatten() for a, b in powers], 1)
    basis, _ = torch.linalg.qr(basis - basis.mean(0))
    return (mean.double().flatten(1) @ basis @ basis.T).reshape(d, h, w).to(mean)


def constant(maps: Tensor) -> Tensor:
    """Return a map (d, h, w) with the mean over patches everywhere."""
    return maps.mean((1, 2), keepdim=True).expand_as(maps)


def readable(probe: ProbeResult) -> dict[str, Any]:
    """Return the held-out R² of each target, and of the headline when shuffled and by image."""
    result: dict[str, Any] = {row.target: float(np.median(row.r2_heldout)) for row in probe.rows}
    result["shuffled"] = float(np.median(probe.rows[0].shuffled))
    return result | {"by picture": np.median(probe.rows[0].r2_heldout, axis=1).tolist()}


def rotated(pair: ModelPair, images: Sequence[Tensor]) -> dict[str, Any]:
    """Return the D4 error of each side, image by image: 0 is the same, 1.41 unrelated."""
    row: dict[str, Any] = {"pictures": len(images), "error": {}}
    for side, function in pair.functions().items():
        result = equivariance(function, images, measures=("error",), controls=False)
        (mean,) = (r for r in result if (r.transform, r.metric, r.part) == (D4_MEAN, "error", FULL))
        row["error"][side] = mean.values.tolist()
    return row
