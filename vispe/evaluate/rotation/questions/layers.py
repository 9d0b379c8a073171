"""Where in the network position enters: equivariance error and readable position after every block, and at the end."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from vispe.backbones.batches import FeatureFunction, batches, checked_maps, features_of
from vispe.backbones.maps import ModelFeatures, patch_projection
from vispe.errors import OptionError
from vispe.evaluate.probe.fit import fit_probe
from vispe.evaluate.probe.ramps import ramp
from vispe.evaluate.rotation.compare import error
from vispe.evaluate.rotation.plan import Measured, Plan, Step
from vispe.evaluate.rotation.questions.features import label_of
from vispe.evaluate.rotation.rows import Measurement
from vispe.evaluate.rotation.steps import Found, _features
from vispe.symmetry.d4 import D4, IDENTITY, Element


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
    poses = [g for g in dict.fromkeys(elements) if g != IDENTITY]
    if not poses or masks < 1:
        raise OptionError(
            f"A layer curve needs a pose besides the identity and at least one mask, got {len(poses)} and {masks}."
        )
    errors: list[list[float]] = [[] for _ in range(f.depth)]
    scores: list[list[float]] = [[] for _ in range(f.depth)]
    for batch in batches(images, batch_size):
        still = _layers(f, batch)
        sums = np.zeros((f.depth, len(batch)))
        for g in poses:
            moved = _permuted_layers(f, batch, g) if position_only else _layers(f, g.apply(batch))
            for k, (a, b) in enumerate(zip(still, moved, strict=True)):
                sums[k] += [error(x, y) for x, y in zip(a, g.undo(b), strict=True)]
        for k in range(f.depth):
            errors[k] += list(sums[k] / len(poses))
        if probe:
            for n in range(len(batch)):
                rng = np.random.default_rng([seed, first + len(scores[0])])
                drawn = [_mask(tuple(still[0].shape[-2:]), rng) for _ in range(masks)]
                for k in range(f.depth):
                    scores[k].append(float(np.mean([_r2(still[k][n], mask) for mask in drawn])))
    label = label_of(poses)
    rows = [Measurement(label, "error", np.array(v), f"layer {k}") for k, v in enumerate(errors)]
    if probe:
        rows += [Measurement("none", "r2", np.array(v), f"layer {k}") for k, v in enumerate(scores)]
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
    """
    if masks < 1:
        raise OptionError(f"position_r2 needs at least one mask, got masks={masks}.")
    found: tuple[list[float], list[float]] = ([], [])
    for batch in batches(images, batch_size):
        for one in features_of(f, batch):
            rng = np.random.default_rng([seed, first + len(found[0])])
            drawn = [_mask(tuple(one.shape[-2:]), rng) for _ in range(masks)]
            order = torch.from_numpy(rng.permutation(one[0].numel())).to(one.device)
            mixed = one.flatten(1)[:, order].reshape(one.shape)
            for values, features in zip(found, (one, mixed), strict=True):
                values.append(float(np.mean([_r2(features, mask) for mask in drawn])))
    return (
        Measurement("none", "r2", np.array(found[0])),
        Measurement("shuffled positions", "r2", np.array(found[1]), control=True),
    )


def _layers(f: ModelFeatures, images: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return [checked_maps(m, len(images)) for m in f.layers(images)]


def _permuted_layers(f: ModelFeatures, images: Tensor, g: Element) -> list[Tensor]:
    with torch.no_grad():
        return [checked_maps(m, len(images)) for m in f.permuted_layers(images, g)]


def _mask(shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """A random quarter of the tokens, at least two."""
    mask = np.zeros(shape, bool)
    chosen = rng.choice(mask.size, max(2, mask.size // 4), replace=False)
    mask.flat[chosen] = True
    return mask


def _r2(features: Tensor, mask: np.ndarray) -> float:
    table = features.permute(1, 2, 0)
    return fit_probe(table, mask, {"lr+ud": ramp("lr+ud", mask.shape)})["lr+ud"].r2_heldout


def _position(what: Measured, plan: Plan, step: Step) -> Found:
    rows = position_r2(
        _features(what),
        step.fitted,
        masks=plan.probe_masks,
        batch_size=plan.batch_size,
        seed=plan.seed,
        first=step.first,
    )
    return {"position": [(len(step.fitted), rows)]}


def _curve(what: Measured, plan: Plan, step: Step) -> Found:
    f, images = _features(what), step.fitted
    if not isinstance(f, ModelFeatures):
        step.notes.append("There is no curve over layers: the layers are known of models only.")
        return {"layers": [(len(images), None)]}
    rows = layer_curve(
        f, images, masks=plan.probe_masks, batch_size=plan.batch_size, seed=plan.seed, first=step.first
    )
    if patch_projection(f.model) is not None:
        found = layer_curve(f, images, position_only=True, probe=False, batch_size=plan.batch_size)
        rows += tuple(replace(r, part=f"{r.part}, position code") for r in found)
    return {"layers": [(len(images), rows)]}
