"""Equivariance error and linear probe of position after every block, and for the final features."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from vispe.backbones.batching import FeatureFunction, batches, checked_maps, features_of
from vispe.backbones.vision_model import VisionModel
from vispe.evaluate.probe.fit import fit_probe
from vispe.evaluate.probe.targets import ramp
from vispe.evaluate.rotation.comparison import Pair, compared, label_of, poses_of, shuffled
from vispe.evaluate.rotation.feature_similarity import error
from vispe.evaluate.rotation.helpers import Rows, features, question
from vispe.evaluate.rotation.plan import ImageBatch, Measured, RotationPlan
from vispe.evaluate.rotation.record_key import POSITION_CODE, SHUFFLED_POSITIONS, UNMOVED, Key
from vispe.evaluate.rotation.records import Measurement
from vispe.images.symmetry.d4 import D4, Element
from vispe.utils.options import PositiveInt, checked


@checked
def layer_curve(
    f: VisionModel,
    images: Iterable[Tensor],
    *,
    elements: Sequence[Element] = D4,
    position_only: bool = False,
    probe: bool = True,
    masks: PositiveInt = 4,
    batch_size: int = 1,
    seed: int = 0,
    first: int = 0,
) -> tuple[Measurement, ...]:
    """Measure the centred error over poses, and the held-out R² of row and column, after every block.

    R² is that of a ridge probe trained on a random quarter of the tokens of one image, as in
    `vispe.evaluate.probe.positional`, averaged over masks. Memory: the maps of all blocks for one batch at two poses.

    Args:
        f: model; blocks are evaluated without the final norm.
        images: (3, H, W) each.
        elements: poses; the identity is ignored.
        position_only: permute tokens after the patch embedding instead of transforming the image.
        probe: whether to measure R².
        masks: number of random training masks per image.
        batch_size: max number of images of equal size per batch.
        seed: random seed of the masks.
        first: index of the first image in a larger list; masks depend on the index of the image.

    Returns:
        For each block k, from 0, the records ('D4', 'error') and ('none', 'r2') with the part 'layer k'.

    Raises:
        OptionError: no masks, or no pose besides the identity.
        InputError: there are no images, or an image or a map has values that are not finite.
        UnsupportedHost: the patch embedding of the model is unknown, with `position_only`.
        ShapeError: an image is not (c, H, W).

    Example:
        >>> import timm, torch
        >>> f = VisionModel(timm.create_model("test_vit", num_classes=0).eval())
        >>> rows = layer_curve(f, torch.rand(1, 3, 160, 160), elements=D4[:2], masks=1)
        >>> len(rows) == 2 * f.depth, rows[0].part
        (True, 'layer 0')
    """
    poses = poses_of(elements, "A layer curve")
    scores: list[list[float]] = [[] for _ in range(f.depth)]

    def pairs(batch: Tensor) -> Iterator[Pair]:
        still = _maps(f.layers, batch)
        for g in poses:
            moved = _maps(f.permuted_layers, batch, g) if position_only else _maps(f.layers, g.apply(batch))
            yield from (((k, g), a, g.undo(b)) for k, (a, b) in enumerate(zip(still, moved, strict=True)))
        for n in range(len(batch) if probe else 0):
            rng = np.random.default_rng([seed, first + len(scores[0])])
            masks_drawn = [_mask(tuple(still[0].shape[-2:]), rng) for _ in range(masks)]
            for k in range(f.depth):
                scores[k].append(_r2(still[k][n], masks_drawn))

    values = compared(images, pairs, {"error": error}, batch_size)
    rows = []
    for k in range(f.depth):
        each = [values[(k, g), "error"] for g in poses]
        rows.append(Measurement.of(Key(label_of(poses), "error", layer=k), sum(each) / len(poses)))
    if probe:
        rows += [Measurement.of(Key(UNMOVED, "r2", layer=k), v) for k, v in enumerate(scores)]
    return tuple(rows)


@checked
def position_r2(
    f: FeatureFunction,
    images: Iterable[Tensor],
    *,
    masks: PositiveInt = 4,
    batch_size: int = 1,
    seed: int = 0,
    first: int = 0,
) -> tuple[Measurement, ...]:
    """Measure the held-out R² of a ridge probe of the row and column of tokens.

    Use images of noise and homogeneous textures: in layered samples, content depends on position. See
    `vispe.evaluate.probe.positional` for other targets and the settings of published tables.

    Args:
        f: images (b, c, H, W) -> maps (b, d, h, w).
        images: (c, H, W) each.
        masks: number of random training masks (a quarter of the tokens) per image.
        batch_size: max number of images of equal size per batch.
        seed: random seed of masks and shuffling.
        first: index of the first image in a larger list; random numbers depend on the index of the image.

    Returns:
        The record ('none', 'r2'), and the control 'shuffled positions', which must be 0 or less.

    Raises:
        OptionError: no masks.
        InputError: there are no images, or an image or a map has values that are not finite.
        ShapeError: an image is not (c, H, W), or `f` does not return one map per image.

    Example:
        >>> ramps = torch.stack(torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij"))
        >>> r2, control = position_r2(lambda images: images, [ramps])
        >>> r2.summary().mean > 0.99, control.control
        (True, True)
    """
    r2: list[float] = []
    control: list[float] = []
    for batch in batches(images, batch_size):
        for one in features_of(f, batch):
            rng = np.random.default_rng([seed, first + len(r2)])
            masks_drawn = [_mask(tuple(one.shape[-2:]), rng) for _ in range(masks)]
            r2.append(_r2(one, masks_drawn))
            control.append(_r2(shuffled(one, rng), masks_drawn))
    return (
        Measurement.of(Key(UNMOVED, "r2"), r2),
        Measurement.of(Key(SHUFFLED_POSITIONS, "r2"), control, control=True),
    )


@torch.no_grad()
def _maps(run: Callable[..., Iterable[Tensor]], images: Tensor, *pose: Element) -> list[Tensor]:
    return [checked_maps(m, len(images)) for m in run(images, *pose)]


def _mask(shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """Return a random quarter of the tokens, at least two."""
    mask = np.zeros(shape, bool)
    chosen = rng.choice(mask.size, max(2, mask.size // 4), replace=False)
    mask.flat[chosen] = True
    return mask


def _r2(features: Tensor, masks: Sequence[np.ndarray]) -> float:
    """Return held-out R² of row and column, averaged over masks."""
    table = features.permute(1, 2, 0)
    target = {"lr+ud": ramp("lr+ud", masks[0].shape)}
    return float(np.mean([fit_probe(table, mask, target)["lr+ud"].r2_heldout for mask in masks]))


@question("position")
def position(measured: Measured, plan: RotationPlan, step: ImageBatch) -> Rows:
    """Probe the position of tokens linearly."""
    return position_r2(features(measured), step.fitted, masks=plan.probe_masks, **_draws(plan, step))


@question("layers")
def layers(measured: Measured, plan: RotationPlan, step: ImageBatch) -> Rows | None:
    """Measure error and probe after every block of a model."""
    f, images = features(measured), step.fitted
    if not isinstance(f, VisionModel):
        step.notes.append("There is no curve over layers, which needs a model.")
        return None
    rows = layer_curve(f, images, masks=plan.probe_masks, **_draws(plan, step))
    if f.permutable:
        moved = layer_curve(f, images, position_only=True, probe=False, batch_size=plan.batch_size)
        rows += tuple(row.about(part=POSITION_CODE) for row in moved)
    return rows


def _draws(plan: RotationPlan, step: ImageBatch) -> dict[str, int]:
    return {"batch_size": plan.batch_size, "seed": plan.seed, "first": step.first}
