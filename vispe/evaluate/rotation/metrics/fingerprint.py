"""Fingerprint: mean feature map over many images, which shows patterns that are fixed to the image frame.

Averaged over n different images, the variance due to content decreases as 1 / n, and positional patterns remain. Each
map is centred over positions first, so that differences in brightness do not count as noise; without a pattern the SNR
is then 1 on average, for any noise.

Memory: one batch of images and its maps, and two maps of sums.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vispe.backbones.batching import FeatureFunction, batches, features_of
from vispe.errors import InputError, ShapeError, counted
from vispe.evaluate.probe.fit import channel_r2
from vispe.evaluate.probe.targets import ramp
from vispe.evaluate.rotation.plan import RotationPlan
from vispe.utils.options import PositiveInt, checked
from vispe.utils.report.table import json_entries

ENOUGH = 30
"""Min number of images for the content to average out."""
MOST_WINDOWS = 64
"""Max number of images that windows are cropped from."""


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """Mean map of a model and its signal-to-noise ratio.

    Attributes:
        mean: mean over images of the centred maps, (d, h, w) float64.
        snr: variance of `mean` over positions, divided by the variance expected from n images without a pattern. About
            1: no pattern; much more than 1: a fixed pattern.
        snr_uncentred: the same with the variance of uncentred maps, which includes brightness.
        channel_snr: `snr` of each channel, (d,); NaN for a constant channel.
        channel_r2: held-out R² of row and column from single channels of `mean`, (d,).
        components: the first principal components of `mean`, (k, h, w), the strongest first.
        explained: their fractions of its variance, (k,).
        n_images: n.
        notes: caveats.

    Example:
        >>> pattern = fingerprint(lambda images: images + torch.arange(6.0), torch.rand(40, 1, 6, 6))
        >>> pattern.mean.shape, pattern.snr > 100, pattern.top_channels()
        ((1, 6, 6), True, [0])
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
        """Return the `n` channels with the highest R² of position, best first."""
        order = np.argsort(-np.nan_to_num(self.channel_r2, nan=-np.inf), kind="stable")
        return [int(c) for c in order[:n]]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values, with the principal components instead of the mean map."""
        of_channels = json_entries(self, "snr", "snr_uncentred", "channel_snr", "channel_r2")
        of_channels["top_channels"] = self.top_channels()
        return of_channels | json_entries(self, "components", "explained", "n_images", "notes")


def fingerprint(
    f: FeatureFunction, images: Iterable[Tensor], *, components: int = 3, batch_size: int = 1
) -> Fingerprint:
    """Average the feature maps of many images and measure the remaining pattern.

    Args:
        f: images (b, c, H, W) -> maps (b, d, h, w).
        images: (c, H, W), all of one size, at least 2, preferably 30 or more; see `random_crops`.
        components: number of principal components of the mean map.
        batch_size: batch size.

    Raises:
        ShapeError: the maps differ in size.
        InputError: fewer than 2 images.
        OptionError: `batch_size` is below 1.

    Example:
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
                    f"fingerprint: maps must have one shape, got {tuple(mean.mean.shape)} and {tuple(one.shape)}. Use "
                    "images of one size, such as random_crops."
                )
            mean.add(centred)
            raw.add(one)
            count += 1
    if mean is None or raw is None or count < 2:
        raise InputError(f"fingerprint: at least 2 images are needed, got {count}. Use {ENOUGH} or more.")
    pattern = mean.mean
    signal = (pattern - pattern.mean((-2, -1), keepdim=True)).square().mean((-2, -1))
    noise, raw_noise = (m.variance().mean((-2, -1)) / count for m in (mean, raw))
    parts, explained = _components(pattern, components)
    table = pattern.permute(1, 2, 0).cpu().numpy()
    notes = () if count >= ENOUGH else (f"{count} images are too few for the content to average out.",)
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


@checked
def random_crops(
    images: Iterable[Tensor], size: tuple[int, int], per_image: PositiveInt, *, seed: int = 0
) -> Iterator[Tensor]:
    """Yield random windows of images.

    Args:
        images: (c, H, W) each, at least as large as the window.
        size: window (height, width) in pixels.
        per_image: number of windows per image.
        seed: random seed of the positions.

    Raises:
        OptionError: `per_image` is below 1.
        ShapeError: an image is smaller than the window.
        InputError: there are no images, or an image has values that are not finite.

    Example:
        >>> [tuple(crop.shape) for crop in random_crops(torch.rand(1, 3, 9, 9), (4, 6), 2)]
        [(3, 4, 6), (3, 4, 6)]
    """
    rng = np.random.default_rng(seed)
    h, w = size
    for batch in batches(images):
        high, wide = batch.shape[-2:]
        if h > high or w > wide:
            raise ShapeError(
                f"random_crops: size must be at most the image {(high, wide)} px, got {size}. Use a smaller one."
            )
        for _ in range(per_image):
            y, x = int(rng.integers(high - h + 1)), int(rng.integers(wide - w + 1))
            yield batch[0][:, y : y + h, x : x + w]


class _Moments:
    """Running mean and variance of tensors (Welford)."""

    def __init__(self, like: Tensor) -> None:
        self.count, self.mean, self._squares = 0, torch.zeros_like(like), torch.zeros_like(like)

    def add(self, value: Tensor) -> None:
        self.count += 1
        deviation = value - self.mean
        self.mean = self.mean + deviation / self.count
        self._squares += deviation * (value - self.mean)

    def variance(self) -> Tensor:
        """Return the unbiased variance."""
        return self._squares / (self.count - 1)


def _components(pattern: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return principal components of a map over positions, with a fixed sign, and their fractions of the variance."""
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
    """Return held-out R² of row and column from single channels, trained on every second token; NaN on one row."""
    h, w = table.shape[:2]
    mask = (np.arange(h)[:, None] + np.arange(w)[None, :]) % 2 == 0
    if min(h, w) < 2:
        return np.full(table.shape[2], np.nan)
    return channel_r2(table, mask, ramp("lr+ud", (h, w)), held_out=True)


def _ratio(signal: Tensor, noise: Tensor) -> float:
    """Return signal / noise; NaN for 0 / 0, infinity for a pattern without noise."""
    if float(noise) == 0:
        return float("inf") if float(signal) > 0 else float("nan")
    return float(signal / noise)


def fingerprint_of_windows(
    f: FeatureFunction, plan: RotationPlan, images: Sequence[Tensor]
) -> tuple[Fingerprint | None, list[str]]:
    """Return the fingerprint of random windows of the images, and notes."""
    patch_size = plan.patch_size or 1
    numbers = np.unique(np.linspace(0, len(images) - 1, min(len(images), MOST_WINDOWS)).round().astype(int))
    shapes = np.array([images[int(n)].shape[-2:] for n in numbers])
    each = -(-ENOUGH // len(numbers))
    low = shapes.min(0)
    if plan.size is not None:
        low = np.minimum(low, plan.size)
    if each > 1 and not plan.exact:
        # smaller windows allow several positions per image
        low = np.minimum(low, np.maximum(3 * low // 4, 3 * patch_size))
    h, w = (int(n) // patch_size * patch_size for n in low)
    if min(h, w) < patch_size or (plan.exact and {h, w} != {plan.size}):
        return None, ["The images are too small for a fingerprint."]
    if (shapes == (h, w)).all():
        each = 1
    if len(numbers) * each < 2:
        return None, [
            "A fingerprint needs several images, or one that is larger than the input size of the model."
        ]
    windows = random_crops((images[int(n)] for n in numbers), (h, w), each, seed=plan.seed)
    pattern = fingerprint(f, windows, batch_size=plan.batch_size)
    return pattern, [
        f"The fingerprint is the mean of {counted(len(numbers) * each, 'window')} of {h} x {w} px."
    ]
