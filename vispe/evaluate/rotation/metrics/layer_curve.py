"""Where in the network position enters: equivariance error and readable position after every block, and at the end."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from vispe.backbones.batching import FeatureFunction, batches, checked_maps, features_of
from vispe.backbones.vision_model import ModelFeatures, patch_projection
from vispe.errors import OptionError
from vispe.evaluate.probe.fit import fit_probe
from vispe.evaluate.probe.targets import ramp
from vispe.evaluate.rotation.comparison import Pair, compared, error, label_of, poses_of, shuffled
from vispe.evaluate.rotation.helpers import Rows, features, question
from vispe.evaluate.rotation.plan import Measured, Plan, Step
from vispe.evaluate.rotation.record_key import POSITION_CODE, SHUFFLED_POSITIONS, UNMOVED, Key
from vispe.evaluate.rotation.records import Measurement
from vispe.symmetry.d4 import D4, Element


def layer_curve(
    f: ModelFeatures,
    images: Iterable[Tensor],
    *,
    elements: Sequence[Element] = D4,
    position_only: bool = False,
    probe: bool = True,
    masks: int = 4,
    batch_size: int = 1,
    seed: int = 0,
    first: int = 0,
) -> tuple[Measurement, ...]:
    """Measure the centred error over poses, and the held-out R² of row and column, after every block.

    R² is that of a ridge probe on a random quarter of the tokens of one image, as `vispe.evaluate.probe.positional`,
    mean over masks. Memory: the maps of all blocks for one batch at two poses.

    Args:
        f: model; its blocks are taken without the final norm.
        images: (3, H, W) each.
        elements: poses; the identity is left out.
        position_only: move tokens after the patch embedding instead of the image.
        probe: measure R² too.
        masks: random masks for each image.
        batch_size: images of equal size that the model sees at once.
        seed: of the masks.
        first: number of the first image in a larger list; every image has its own masks.

    Returns:
        For each block k, from 0, the rows ('D4', 'error') and ('none', 'r2') under the part 'layer k'.
    """
    poses = poses_of(elements, "A layer curve")
    if masks < 1:
        raise OptionError(f"A layer curve needs at least one mask, got {masks=}.")
    scores: list[list[float]] = [[] for _ in range(f.depth)]

    def pairs(batch: Tensor) -> Iterator[Pair]:
        still = _maps(f.layers, batch)
        for g in poses:
            moved = _maps(f.permuted_layers, batch, g) if position_only else _maps(f.layers, g.apply(batch))
            yield from (((k, g), a, g.undo(b)) for k, (a, b) in enumerate(zip(still, moved, strict=True)))
        for n in range(len(batch) if probe else 0):
            rng = np.random.default_rng([seed, first + len(scores[0])])
            drawn = [_mask(tuple(still[0].shape[-2:]), rng) for _ in range(masks)]
            for k in range(f.depth):
                scores[k].append(_r2(still[k][n], drawn))

    values = compared(images, pairs, {"error": error}, batch_size)
    rows = []
    for k in range(f.depth):
        each = [values[(k, g), "error"] for g in poses]
        rows.append(Measurement.of(Key(label_of(poses), "error", layer=k), sum(each) / len(poses)))
    if probe:
        rows += [Measurement.of(Key(UNMOVED, "r2", layer=k), v) for k, v in enumerate(scores)]
    return tuple(rows)


def position_r2(
    f: FeatureFunction,
    images: Iterable[Tensor],
    *,
    masks: int = 4,
    batch_size: int = 1,
    seed: int = 0,
    first: int = 0,
) -> tuple[Measurement, ...]:
    """Measure how well row and column of a token are read from its features, linearly: held-out R² of a ridge probe.

    Meaningful on noise and homogeneous textures: where the sample is layered, position is information. See
    `vispe.evaluate.probe.positional` for other targets and the settings of published tables.

    Args:
        f: images (b, c, H, W) -> maps (b, d, h, w).
        images: (c, H, W) each.
        masks: random quarters of the tokens to fit on, for each image.
        batch_size: images of equal size that f sees at once.
        seed: of masks and shuffling.
        first: number of the first image in a larger list; every image has its own draws.

    Returns:
        The row ('none', 'r2'), and the control 'shuffled positions', where a sound probe finds 0 or less.

    >>> ramps = torch.stack(torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij"))
    >>> own, shuffled_places = position_r2(lambda images: images, [ramps])
    >>> own.summary().mean > 0.99, shuffled_places.control
    (True, True)
    """
    if masks < 1:
        raise OptionError(f"position_r2 needs at least one mask, got masks={masks}.")
    own: list[float] = []
    control: list[float] = []
    for batch in batches(images, batch_size):
        for one in features_of(f, batch):
            rng = np.random.default_rng([seed, first + len(own)])
            drawn = [_mask(tuple(one.shape[-2:]), rng) for _ in range(masks)]
            own.append(_r2(one, drawn))
            control.append(_r2(shuffled(one, rng), drawn))
    return (
        Measurement.of(Key(UNMOVED, "r2"), own),
        Measurement.of(Key(SHUFFLED_POSITIONS, "r2"), control, control=True),
    )


@torch.no_grad()
def _maps(run: Callable[..., Iterable[Tensor]], images: Tensor, *pose: Element) -> list[Tensor]:
    return [checked_maps(m, len(images)) for m in run(images, *pose)]


def _mask(shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """A random quarter of the tokens, at least two."""
    mask = np.zeros(shape, bool)
    chosen = rng.choice(mask.size, max(2, mask.size // 4), replace=False)
    mask.flat[chosen] = True
    return mask


def _r2(features: Tensor, masks: Sequence[np.ndarray]) -> float:
    """Held-out R² of row and column, mean over the masks."""
    table = features.permute(1, 2, 0)
    target = {"lr+ud": ramp("lr+ud", masks[0].shape)}
    return float(np.mean([fit_probe(table, mask, target)["lr+ud"].r2_heldout for mask in masks]))


@question("position")
def position(measured: Measured, plan: Plan, step: Step) -> Rows:
    """Read the position of each token from its features."""
    return position_r2(features(measured), step.fitted, masks=plan.probe_masks, **_draws(plan, step))


@question("layers")
def layers(measured: Measured, plan: Plan, step: Step) -> Rows | None:
    """Follow error and readable position through the blocks of a model."""
    f, images = features(measured), step.fitted
    if not isinstance(f, ModelFeatures):
        step.notes.append("There is no curve over layers: the layers are known of models only.")
        return None
    rows = layer_curve(f, images, masks=plan.probe_masks, **_draws(plan, step))
    if patch_projection(f.model) is not None:
        moved = layer_curve(f, images, position_only=True, probe=False, batch_size=plan.batch_size)
        rows += tuple(row.about(part=POSITION_CODE) for row in moved)
    return rows


def _draws(plan: Plan, step: Step) -> dict[str, int]:
    return {"batch_size": plan.batch_size, "seed": plan.seed, "first": step.first}
