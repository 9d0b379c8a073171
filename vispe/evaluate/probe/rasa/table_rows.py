"""Rows of the table of `probe_baselines` with RASA, and the settings of the fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from vispe.backbones.batching import FeatureFunction
from vispe.errors import InputError, counted
from vispe.evaluate.probe.group_averages import transform_averages
from vispe.evaluate.probe.rasa.fit import Rasa
from vispe.evaluate.probe.rasa.optimisation import NULL
from vispe.evaluate.probe.rasa.projection import RasaProjection

ALPHA = 0.01  # with less, planes have small variance, and a regularised probe still decodes position
PUBLISHED_ROUNDS = 9
MAX_IMAGES = 16  # for one fit: 22,000 tokens of 37 x 37 patches, 67 MB for 384 channels


def default_rounds(channels: int) -> int:
    """Return the default number of rounds: 32, but at most a quarter of the directions is removed."""
    return min(32, max(1, channels // 8))


class FitMaps:
    """Maps of the images on which RASA is fitted, collected during a pass over images that also has another purpose.

    Args:
        f: feature function, None for features.
        patch_size: patch size in pixels, None for no averages over poses.
        halves: whether to separate images 0, 2, ... from 1, 3, ...
    """

    def __init__(self, f: FeatureFunction | None, patch_size: int | None, halves: bool) -> None:
        self.f, self.patch_size, self.halves = f, patch_size, halves
        self.maps: list[list[Tensor]] = [[], []]
        self.averages: list[list[Tensor | str]] = [[], []]

    def each(self, pairs: Iterable[tuple[Tensor | None, Tensor]]) -> Iterator[Tensor]:
        """Yield the maps (C, h, w) of pairs (image, map), and store the first ones with their averages over poses."""
        for number, (image, original) in enumerate(pairs):
            half = number % 2 if self.halves else 0
            if len(self.maps[half]) < MAX_IMAGES:
                self.maps[half].append(original)
                if self.f is not None and self.patch_size is not None:
                    # with a single shift: 8 forward passes
                    averages = transform_averages(self.f, image, self.patch_size, 1)
                    self.averages[half].append(averages["d4_average"])
            yield original

    def folds(self) -> list[tuple[list[Tensor], list[Tensor | str] | None]]:
        """Return maps and averages to fit on for scored images 0, 2, ... and 1, 3, ... (or for all)."""
        averages = self.averages if self.f is not None and self.patch_size is not None else [None, None]
        folds = list(zip(self.maps, averages, strict=True))
        return folds[::-1] if self.halves else folds[:1]


class RasaRows:
    """Rows of `probe_baselines` with RASA, for one set of images on which it is fitted.

    Args:
        maps: features (C, h, w) of the images on which RASA is fitted.
        averages: their averages over the eight poses, or a reason for a missing one; None without a model.
        mixed: RASA fitted on images of several kinds, for the row `rasa_mixed`; None for no such row.
        rounds: clipped to the rank of the features; `default_rounds` for None.
    """

    def __init__(
        self,
        maps: Sequence[Tensor],
        averages: Sequence[Tensor | str] | None,
        mixed: RasaProjection | str | None,
        rounds: int | None,
    ) -> None:
        self.projections: dict[str, RasaProjection | str] = {
            "rasa_published": fitted(maps, PUBLISHED_ROUNDS, published=True),
            "rasa": fitted(maps, rounds),
        }
        if mixed is not None:
            self.projections["rasa_mixed"] = mixed
        if averages is not None:
            self.projections["d4_rasa"] = fitted(averages, rounds)
        count = {"rasa_mixed": "images of several kinds"}
        others = counted(len(maps), "other image")
        self.details = {
            key: f"{counted(one.rounds, 'round')}, fitted on {count.get(key, others)}"
            for key, one in self.projections.items()
            if not isinstance(one, str)
        }
        """Sentences on the fit, by row."""

    def apply(self, maps: Mapping[str, Tensor | str]) -> Iterator[tuple[str, Tensor | str]]:
        """Yield the key and the map (C, h, w), or the reason why it is unavailable, of every row.

        Args:
            maps: maps of one image, by row: `none`, and `d4_average` for `d4_rasa`.
        """
        for key, projection in self.projections.items():
            base = maps["d4_average" if key == "d4_rasa" else "none"]
            if isinstance(base, str) or isinstance(projection, str):
                yield key, base if isinstance(base, str) else str(projection)
            else:
                yield key, projection.apply(base.movedim(0, -1)).movedim(-1, 0)


def fitted(maps: Sequence[Tensor | str], rounds: int | None, published: bool = False) -> RasaProjection | str:
    """Return RASA fitted on maps (C, h, w) of any sizes, or the reason why it cannot be fitted.

    Args:
        maps: features; a string is a reason for a missing map.
        rounds: clipped to the rank of the features; `default_rounds` for None.
        published: without standardisation and penalty, as in the paper.
    """
    reasons = [one for one in maps if isinstance(one, str)]
    if reasons:
        return reasons[0]
    if not maps:
        return "needs images that are not scored to fit on; pass choose_on, or at least 2 images that can be read again"
    tokens = torch.cat([one.flatten(1).mT for one in maps])
    tokens = tokens - tokens.mean(0)
    variances = torch.linalg.eigvalsh(tokens.mT @ tokens)
    rank = int((variances > NULL * variances[-1]).sum())
    rounds = default_rounds(len(variances)) if rounds is None else rounds
    # at least one direction has to remain
    rounds = min(rounds, (rank - 1) // 2)
    if rounds < 1:
        return (
            f"needs at least 1 round and features that vary in 3 directions, got {counted(rank, 'direction')}"
        )
    rasa = Rasa(rounds, standardize=not published, alpha=0.0 if published else ALPHA)
    try:
        return rasa.fit([one.movedim(0, -1) for one in maps]).projection_
    except InputError as error:
        return f"cannot be fitted: {error}".rstrip(".")
