"""Pictures of one image: its features as colours and its labels, in every pose, brought back."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from vispe.backbones.batching import FeatureFunction, features_of, labels_of
from vispe.evaluate.rotation.helpers import segmenter_for
from vispe.evaluate.rotation.plan import Measured, Plan, Step
from vispe.symmetry.d4 import D4, IDENTITY

Shown = Callable[[Tensor], np.ndarray]
"""An image (c, H, W) as the model gets it -> a picture (H, W, 3) in [0, 1]."""


def shown_in_range(image: Tensor) -> np.ndarray:
    """Return an image (c, H, W) as a picture (H, W, 3), black at its least value and white at its largest."""
    picture = image.detach().cpu().double()
    picture = picture.expand(3, -1, -1) if len(picture) == 1 else picture[:3]
    if len(picture) < 3:
        picture = picture.mean(0, keepdim=True).expand(3, -1, -1)
    low, high = picture.min(), picture.max()
    scaled = (picture - low) / (high - low).clamp_min(torch.finfo(picture.dtype).tiny)
    return np.ascontiguousarray(scaled.permute(1, 2, 0).numpy())


def example_maps(f: FeatureFunction, image: Tensor) -> dict[str, np.ndarray]:
    """Return the map of an image (c, H, W) in every pose, brought back, as colours (h, w, 3) in [0, 1].

    Red, green and blue are the first three principal components of the map at rest, from its 1st to its 99th
    percentile; the other poses are shown on the same axes and in the same range. A component that is not there is grey.
    """
    maps = {g.name: g.undo(features_of(f, g.apply(image)[None])[0]) for g in D4}
    still = maps[IDENTITY.name].flatten(1)
    mean = still.mean(1, keepdim=True)
    axes, strength, _ = torch.linalg.svd(still - mean, full_matrices=False)
    axes = axes[:, :3][:, strength[:3] > strength[0] * 1e-9]
    flip = axes.gather(0, axes.abs().argmax(0, keepdim=True)) < 0
    axes = axes * torch.where(flip, -1.0, 1.0)
    parts = {name: axes.T @ (one.flatten(1) - mean) for name, one in maps.items()}
    ends = torch.tensor([0.01, 0.99], dtype=still.dtype, device=still.device)
    low, high = torch.quantile(parts[IDENTITY.name], ends, dim=1)[..., None]
    colours = {}
    for name, part in parts.items():
        scaled = ((part - low) / (high - low).clamp_min(torch.finfo(part.dtype).tiny)).clamp(0, 1)
        grey = torch.full((3 - len(scaled), scaled.shape[1]), 0.5, dtype=scaled.dtype, device=scaled.device)
        full = scaled.expand(3, -1) if len(scaled) == 1 else torch.cat([scaled, grey])
        colours[name] = full.reshape(3, *maps[name].shape[1:]).permute(1, 2, 0).cpu().numpy().copy()
    return colours


def example_labels(measured: Measured, plan: Plan, step: Step) -> dict[str, np.ndarray]:
    """Return the labels (H, W) of the first image of a step in every pose, brought back; {} without a segmenter."""
    s = segmenter_for(measured, plan, step, 0, None if measured.segmenter else (IDENTITY,))
    if s is None:
        return {}
    return {g.name: g.undo(labels_of(s, g.apply(step.fitted[0]))) for g in D4}
