"""What is measured before and after a retrofit, on pictures that were not trained on; and which channels tell position.

Readable position of the teacher, of the teacher without the blanked channels, and of the student are probed with the
same fitted patches. Beside them stand the cosine to what the student was taught and the effective rank: features that
say nothing are not positional either. `vispe.train.evaluate.measure` measures much more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vispe.backbones.batches import features_of
from vispe.backbones.tokens import Backbone, final_tokens
from vispe.evaluate.probe.averages import effective_rank, mean_cosine
from vispe.evaluate.probe.trials import TOLD, Trials
from vispe.train.evaluate.pictures import Noise, Settings, Textures, probe_step
from vispe.train.retrofit.config import Probe
from vispe.train.retrofit.losses import blanked

Maps = Callable[[Tensor], Tensor]


def feature_maps(model: torch.nn.Module, device: torch.device) -> Maps:
    """Return the function from images (b, 3, H, W) to final maps (b, d, h, w) on the CPU, without gradients."""

    def maps(images: Tensor) -> Tensor:
        with torch.no_grad():
            return final_tokens(model, images.to(device))[0].float().cpu()

    return maps


def pictures(teacher: Backbone, probe: Probe, size: int, seed: int) -> dict[str, Sequence[Tensor]]:
    """Return normalised pictures that show no place, (3, side, side) each, by kind: 'noise' and 'textures'.

    Args:
        teacher: whose normalisation is used.
        probe: how many.
        size: of the images of the first stage in pixels.
        seed: of the pictures.
    """
    side = probe.size or size
    settings = Settings(teacher.patch, side, teacher.mean, teacher.std)
    found = {"noise": Noise(probe.noise, side, settings, seed)} if probe.noise else {}
    return found | ({"textures": Textures(probe.textures, side, settings, seed)} if probe.textures else {})


def telling_channels(
    teacher: Maps, found: dict[str, Sequence[Tensor]], probe: Probe, count: int
) -> list[int]:
    """Return the channels from which the position of a patch is read best, most telling first.

    A channel is judged by its best held-out R² over row, column, diagonal, distance to the centre and raster order,
    mean over pictures.

    Args:
        teacher: images -> maps.
        found: pictures by kind.
        probe: how it is fitted.
        count: of channels.
    """
    rng, curves = np.random.default_rng(probe.seed), []
    for kind in found.values():
        for picture in kind:
            own = features_of(teacher, picture[None])[0].permute(1, 2, 0)
            trials = _trials(probe, own.shape[0])
            curves.append(trials.channels(own, trials.draw(tuple(own.shape[:2]), rng))[1:])
    telling = np.nan_to_num(np.mean(curves, axis=0), nan=-np.inf).max(0)
    return [int(c) for c in np.argsort(-telling, kind="stable")[:count]]


def compare(
    teacher: Maps, student: Maps, channels: Sequence[int], found: dict[str, Sequence[Tensor]], probe: Probe
) -> dict[str, Any]:
    """Measure teacher, blanked teacher and student on the same pictures with the same fitted patches.

    Args:
        teacher: images -> maps.
        student: likewise.
        channels: that are blanked.
        found: pictures by kind.
        probe: how it is fitted.

    Returns:
        JSON values by kind: for 'before' (teacher), 'blanked' and 'after' (student) the held-out R² of each target and
        of the shuffled headline, median over pictures; 'cosine' of the student to the blanked teacher, and 'rank'
        (effective rank) of all three, means over pictures.
    """
    rng, report = np.random.default_rng(probe.seed), {}
    for kind, those in found.items():
        rows: dict[str, list[np.ndarray]] = {"before": [], "blanked": [], "after": []}
        cosine, rank = [], {key: [] for key in rows}
        for picture in those:
            own, after = (features_of(f, picture[None]) for f in (teacher, student))
            maps = {"before": own, "blanked": blanked(own, channels), "after": after}
            trials = _trials(probe, own.shape[2])
            trial = trials.draw(tuple(own.shape[2:]), rng)
            for key, value in maps.items():
                r2, control = trials.scores(value[0].permute(1, 2, 0), trial)
                rows[key].append(np.append(r2, control[0]))
                rank[key].append(effective_rank(value[0]))
            cosine.append(mean_cosine(after[0], maps["blanked"][0]))
        names = (*TOLD, "shuffled")
        report[kind] = {
            "pictures": len(those),
            **{
                key: dict(zip(names, map(_plain, np.median(row, axis=0)), strict=True))
                for key, row in rows.items()
            },
            "cosine": _plain(np.mean(cosine)),
            "rank": {key: _plain(np.mean(value)) for key, value in rank.items()},
        }
    return report


def likeness(
    teacher: Maps, student: Maps, channels: Sequence[int], images: Tensor
) -> dict[str, float | None]:
    """Return cosine to the blanked teacher and effective ranks on images (b, 3, H, W), means over images."""
    pairs = []
    for image in images:
        own, after = features_of(teacher, image[None]), features_of(student, image[None])[0]
        target = blanked(own, channels)[0]
        pairs.append((mean_cosine(after, target), effective_rank(after), effective_rank(target)))
    cosine, rank, target = np.mean(pairs, axis=0)
    return {
        "images": len(images),
        "cosine": _plain(cosine),
        "rank": _plain(rank),
        "rank_target": _plain(target),
    }


def verdict(report: dict[str, Any], data: dict[str, Any], blank: int, channels: int) -> str:
    """Return the result in a few lines: readable position before and after, and what was kept."""
    lines = [
        f"position read from {kind} (held-out R²: 1 all, 0 or less nothing): "
        f"{_number(found['before']['lr+ud'])} before, "
        f"{_number(found['blanked']['lr+ud'])} with {blank} of {channels} channels blanked, "
        f"{_number(found['after']['lr+ud'])} after"
        for kind, found in report.items()
    ]
    share = None if not data["rank_target"] else (data["rank"] or 0.0) / data["rank_target"]
    lines.append(
        f"kept on images of the data: cosine {_number(data['cosine'])} to the features that were to be learnt, "
        f"effective rank x {_number(share)}"
    )
    return "\n".join(lines)


def _trials(probe: Probe, patches: int) -> Trials:
    return Trials(TOLD, probe.step or probe_step(patches), probe.masks)


def _plain(value: float) -> float | None:
    return round(float(value), 6) if np.isfinite(value) else None


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"
