"""The fingerprint: what the mean of many feature maps still shows is a pattern fixed to the frame.

Averaged over n different images, content cancels as 1/n and what depends on the place alone stays. Each map is first
freed of its own mean over positions, so that brightness, which differs between images, is no noise; the ratio is then
1 on average when there is no pattern, whatever the noise.

Memory: one batch of images and its maps, and two maps of sums.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vispe.backbones.batching import FeatureFunction, batches, features_of
from vispe.errors import InputError, OptionError, ShapeError
from vispe.evaluate.probe.fit import channel_r2
from vispe.evaluate.probe.targets import ramp
from vispe.report.table import json_entries

ENOUGH = 30
"""Images below which the mean map is still mostly content."""


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """The mean map of a model and how much of it is more than chance.

    Attributes:
        mean: mean over images of the maps less their own mean over positions, (d, h, w) float64.
        snr: variance of `mean` over positions, divided by what the scatter of n images leaves in it. About 1: no
            pattern; much more than 1: a fixed one.
        snr_uncentred: the same with the scatter of the maps as they are, in which the images' brightness counts.
        channel_snr: `snr` of each channel, (d,); NaN for a channel that never varies.
        channel_r2: held-out R² of row and column read from each channel of `mean` alone, (d,): names the guilty ones.
        components: the first principal components of `mean`, (k, h, w), the strongest first.
        explained: their shares of its variance, (k,).
        n_images: n.
        notes: what weakens the numbers.
    """

    mean: np.ndarray
    snr: float
    snr_uncentred: float
    channel_snr: np.ndarray
    channel_r2: np.ndarray
    components: np.ndarray
    explained: np.ndarray
    n_images: int
    notes: tuple[str, ...] = ()

    def top_channels(self, n: int = 6) -> list[int]:
        """Return the `n` channels that reveal most of the position, best first."""
        order = np.argsort(-np.nan_to_num(self.channel_r2, nan=-np.inf), kind="stable")
        return [int(c) for c in order[:n]]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values, the principal components as the picture of the mean map."""
        of_channels = json_entries(self, "snr", "snr_uncentred", "channel_snr", "channel_r2")
        of_channels["top_channels"] = self.top_channels()
        return of_channels | json_entries(self, "components", "explained", "n_images", "notes")


def fingerprint(
    f: FeatureFunction, images: Iterable[Tensor], *, components: int = 3, batch_size: int = 1
) -> Fingerprint:
    """Average the maps of many images and measure what stays.

    Args:
        f: images (b, c, H, W) -> maps (b, d, h, w).
        images: (c, H, W), all of one size, at least 2, better 30 or more; `random_crops` makes many of few.
        components: principal components of the mean map.
        batch_size: images that f sees at once.

    Raises:
        ShapeError: the maps differ in size.
        InputError: fewer than 2 images.

    >>> ramp = torch.linspace(0, 9, 6)
    >>> pattern = fingerprint(lambda images: images + ramp, torch.rand(40, 1, 6, 6))
    >>> pattern.snr > 100, pattern.n_images
    (True, 40)
    """
    count, mean, raw = 0, None, None
    for batch in batches(images, batch_size):
        for one in features_of(f, batch):
            centred = one - one.mean((-2, -1), keepdim=True)
            if mean is None or raw is None:
                mean, raw = _Moments(centred), _Moments(one)
            if one.shape != mean.mean.shape:
                raise ShapeError(
                    f"The fingerprint averages maps of one shape, got {tuple(mean.mean.shape)} and {tuple(one.shape)}; "
                    "give images of one size, such as random_crops."
                )
            mean.add(centred)
            raw.add(one)
            count += 1
    if mean is None or raw is None or count < 2:
        raise InputError(f"The fingerprint compares images, got {count}; give at least 2, better {ENOUGH}.")
    pattern = mean.mean
    signal = (pattern - pattern.mean((-2, -1), keepdim=True)).square().mean((-2, -1))
    noise, raw_noise = (m.variance().mean((-2, -1)) / count for m in (mean, raw))
    parts, explained = _components(pattern, components)
    table = pattern.permute(1, 2, 0).cpu().numpy()
    notes = () if count >= ENOUGH else (f"Only {count} images: content has not yet averaged out.",)
    return Fingerprint(
        mean=pattern.cpu().numpy(),
        snr=_ratio(signal.sum(), noise.sum()),
        snr_uncentred=_ratio(signal.sum(), raw_noise.sum()),
        channel_snr=np.array([_ratio(s, n) for s, n in zip(signal, noise, strict=True)]),
        channel_r2=_channel_r2(table),
        components=parts.cpu().numpy(),
        explained=explained.cpu().numpy(),
        n_images=count,
        notes=notes,
    )


def random_crops(
    images: Iterable[Tensor], size: tuple[int, int], per_image: int, *, seed: int = 0
) -> Iterator[Tensor]:
    """Yield random windows of images: many pictures of one sample, at different places.

    Args:
        images: (c, H, W) each, at least as large as the window.
        size: window (height, width) in pixels.
        per_image: windows of each image.
        seed: of the places.

    >>> [tuple(crop.shape) for crop in random_crops(torch.rand(1, 3, 9, 9), (4, 6), 2)]
    [(3, 4, 6), (3, 4, 6)]
    """
    if per_image < 1:
        raise OptionError(f"random_crops needs at least one window of each image, got per_image={per_image}.")
    rng = np.random.default_rng(seed)
    h, w = size
    for batch in batches(images):
        high, wide = batch.shape[-2:]
        if h > high or w > wide:
            raise ShapeError(
                f"A window of {size} px does not fit into an image of {(high, wide)} px; make it smaller."
            )
        for _ in range(per_image):
            y, x = int(rng.integers(high - h + 1)), int(rng.integers(wide - w + 1))
            yield batch[0][:, y : y + h, x : x + w]


class _Moments:
    """Mean and variance of tensors that come one by one (Welford)."""

    def __init__(self, like: Tensor) -> None:
        self.count, self.mean, self._squares = 0, torch.zeros_like(like), torch.zeros_like(like)

    def add(self, value: Tensor) -> None:
        self.count += 1
        away = value - self.mean
        self.mean = self.mean + away / self.count
        self._squares += away * (value - self.mean)

    def variance(self) -> Tensor:
        """Unbiased variance over what was added."""
        return self._squares / (self.count - 1)


def _components(pattern: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Principal components of a map over its positions, with a definite sign, and their shares of the variance."""
    h, w = pattern.shape[1:]
    tokens = pattern.flatten(1).T
    tokens = tokens - tokens.mean(0)
    u, s, _ = torch.linalg.svd(tokens, full_matrices=False)
    k = min(count, len(s))
    maps = (u[:, :k] * s[:k]).T
    largest = maps.gather(1, maps.abs().argmax(1, keepdim=True))
    maps = maps * torch.where(largest < 0, -1.0, 1.0)
    total = s.square().sum().clamp_min(torch.finfo(s.dtype).tiny)
    return maps.reshape(k, h, w), s[:k].square() / total


def _channel_r2(table: np.ndarray) -> np.ndarray:
    """Held-out R² of row and column from each channel, fitted on every second token; NaN on a single row or column."""
    h, w = table.shape[:2]
    mask = (np.arange(h)[:, None] + np.arange(w)[None, :]) % 2 == 0
    if min(h, w) < 2:
        return np.full(table.shape[2], np.nan)
    return channel_r2(table, mask, ramp("lr+ud", (h, w)), held_out=True)


def _ratio(signal: Tensor, noise: Tensor) -> float:
    """Return signal / noise; NaN for 0/0, infinite for a pattern without any scatter."""
    if float(noise) == 0:
        return float("inf") if float(signal) > 0 else float("nan")
    return float(signal / noise)
