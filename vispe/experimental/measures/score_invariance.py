"""Invariance of image-level class scores, for comparison with the literature.

Sources: the companion metrics of Gruver et al. (arXiv 2210.02984) and, for shifts and rotations by any amount, the
equivariance scores of StyleGAN3 (Karras et al., arXiv 2106.12423) applied to the softmax.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from vispe.backbones.batching import batches
from vispe.errors import OptionError, ShapeError, counted
from vispe.evaluate.rotation.metrics.lie_derivative import moved
from vispe.evaluate.rotation.record_key import Key
from vispe.evaluate.rotation.records import Measurement
from vispe.images.symmetry.warp import rotate
from vispe.utils.interval import Interval
from vispe.utils.options import PositiveInt, checked

Classifier = Callable[[Tensor], Tensor]
"""Images (b, c, H, W) -> logits (b, k)."""

CHANGES = ("shift by whole pixels", "shift by any amount", "rotation by any angle")


def argmax_consistency(
    classifier: Classifier, images: Iterable[Tensor], *, rolls: Sequence[int] = range(8), batch_size: int = 1
) -> tuple[Measurement, ...]:
    """Measure how often the predicted class is unchanged when an image is rolled by 0 to 7 pixels along each axis.

    Args:
        classifier: images (b, c, H, W) -> logits (b, k).
        images: (c, H, W) each.
        rolls: pixels; every pair of them is a shift, except (0, 0).
        batch_size: max number of images of equal size per batch.

    Returns:
        One record, the fraction of shifts with the class of the original image.

    Raises:
        OptionError: no shift other than (0, 0).
        InputError: there are no images, or an image has values that are not finite.
        ShapeError: an image is not (c, H, W), or the logits are not (b, k).

    Example:
        >>> argmax_consistency(lambda images: images.mean((-2, -1)), torch.rand(1, 3, 8, 8))[0].values.tolist()
        [1.0]
    """
    shifts = [(dy, dx) for dy in rolls for dx in rolls if (dy, dx) != (0, 0)]
    if not shifts:
        raise OptionError(
            f"argmax_consistency: rolls must have a value other than 0, got {list(rolls)}. Use range(8)."
        )
    values: list[float] = []
    for batch in batches(images, batch_size):
        reference = _logits(classifier, batch).argmax(1)
        rolled = (torch.roll(batch, s, (-2, -1)) for s in shifts)
        same = sum((_logits(classifier, one).argmax(1) == reference).double() for one in rolled)
        values += (torch.as_tensor(same) / len(shifts)).tolist()
    return (Measurement.of(Key("rolls", "argmax"), values),)


@checked
def score_changes(
    classifier: Classifier,
    images: Iterable[Tensor],
    *,
    draws: PositiveInt = 8,
    share: Annotated[float, Interval(above=0, below=1)] = 0.125,
    degrees: Annotated[float, Interval(above=0, most=180)] = 180.0,
    batch_size: int = 1,
    seed: int = 0,
) -> tuple[Measurement, ...]:
    """Measure the mean squared change of the softmax under random shifts and rotations.

    Shifts by integer pixels are cyclic, others bilinear and mirrored at the border; rotations are bilinear, mirrored.

    Args:
        classifier: images (b, c, H, W) -> logits (b, k).
        images: (c, H, W) each.
        draws: number of random transforms of each kind, the same for all images.
        share: max shift, as a fraction of each side.
        degrees: max absolute angle.
        batch_size: max number of images of equal size per batch.
        seed: random seed of the random transforms.

    Returns:
        A record for each of `CHANGES`.

    Raises:
        OptionError: an option is out of range.
        InputError: there are no images, or an image or a map has values that are not finite.
        ShapeError: an image is not (c, H, W), or the logits are not (b, k).

    Example:
        >>> rows = score_changes(lambda images: images.mean((2, 3)), torch.rand(1, 3, 8, 8), draws=2)
        >>> rows[0].transform, rows[0].summary().mean < 1e-12
        ('shift by whole pixels', True)
    """
    drawn = np.random.default_rng(seed).uniform(-1, 1, (draws, 5))
    values: dict[str, list[float]] = {name: [] for name in CHANGES}
    for batch in batches(images, batch_size):
        h, w = batch.shape[-2:]
        reference = _logits(classifier, batch).softmax(1)
        totals = {name: torch.zeros(len(batch), dtype=torch.float64) for name in CHANGES}
        for a, b, c, d, e in drawn:
            pixels = (round(a * share * h), round(b * share * w))
            changed = (
                torch.roll(batch, pixels, (-2, -1)),
                moved(moved(batch, "down", c * share * h), "right", d * share * w),
                rotate(batch, e * degrees, mode="bilinear"),
            )
            for name, image in zip(CHANGES, changed, strict=True):
                change = _logits(classifier, image).softmax(1) - reference
                totals[name] += change.square().mean(1).cpu()
        for name, total in totals.items():
            values[name] += (total / draws).tolist()
    return tuple(Measurement.of(Key(name, "score_change"), v) for name, v in values.items())


def _logits(classifier: Classifier, images: Tensor) -> Tensor:
    with torch.no_grad():
        logits = classifier(images)
    if logits.ndim != 2 or len(logits) != len(images):
        raise ShapeError(
            f"classifier: logits must be (b, k) for {counted(len(images), 'image')}, got {tuple(logits.shape)}. "
            "Return one row per image."
        )
    return logits.double()
