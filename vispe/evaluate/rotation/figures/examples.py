"""Example image for figures: features as colours and labels in every pose, with the pose undone."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from vispe.backbones.batching import FeatureFunction, features_of, labels_of
from vispe.evaluate.rotation.helpers import segmenter_for
from vispe.evaluate.rotation.plan import ImageBatch, Measured, RotationPlan
from vispe.images.symmetry.d4 import D4, IDENTITY

Shown = Callable[[Tensor], np.ndarray]
"""Converts a normalised image (c, H, W) to RGB (H, W, 3) in [0, 1]."""


def rescale_to_rgb(image: Tensor) -> np.ndarray:
    """Return an image (c, H, W) as RGB (H, W, 3), rescaled from its min and max to [0, 1]."""
    rgb = image.detach().cpu().double()
    rgb = rgb.expand(3, -1, -1) if len(rgb) == 1 else rgb[:3]
    if len(rgb) < 3:
        rgb = rgb.mean(0, keepdim=True).expand(3, -1, -1)
    low, high = rgb.min(), rgb.max()
    scaled = (rgb - low) / (high - low).clamp_min(torch.finfo(rgb.dtype).tiny)
    return np.ascontiguousarray(scaled.permute(1, 2, 0).numpy())


def example_maps(f: FeatureFunction, image: Tensor) -> dict[str, np.ndarray]:
    """Return the map of an image (c, H, W) in every pose, with the pose undone, as colours (h, w, 3) in [0, 1].

    Red, green and blue are the first three principal components of the original map, from its 1st to its 99th
    percentile; the other poses use the same axes and range. Missing components are grey.
    """
    maps = {g.name: g.undo(features_of(f, g.apply(image)[None])[0]) for g in D4}
    original = maps[IDENTITY.name].flatten(1)
    mean = original.mean(1, keepdim=True)
    axes, strength, _ = torch.linalg.svd(original - mean, full_matrices=False)
    axes = axes[:, :3][:, strength[:3] > strength[0] * 1e-9]
    flip = axes.gather(0, axes.abs().argmax(0, keepdim=True)) < 0
    axes = axes * torch.where(flip, -1.0, 1.0)
    parts = {name: axes.T @ (one.flatten(1) - mean) for name, one in maps.items()}
    quantiles = torch.tensor([0.01, 0.99], dtype=original.dtype, device=original.device)
    low, high = torch.quantile(parts[IDENTITY.name], quantiles, dim=1)[..., None]
    colours = {}
    for name, part in parts.items():
        scaled = ((part - low) / (high - low).clamp_min(torch.finfo(part.dtype).tiny)).clamp(0, 1)
        grey = torch.full((3 - len(scaled), scaled.shape[1]), 0.5, dtype=scaled.dtype, device=scaled.device)
        full = scaled.expand(3, -1) if len(scaled) == 1 else torch.cat([scaled, grey])
        colours[name] = full.reshape(3, *maps[name].shape[1:]).permute(1, 2, 0).cpu().numpy().copy()
    return colours


def example_labels(measured: Measured, plan: RotationPlan, step: ImageBatch) -> dict[str, np.ndarray]:
    """Return the labels (H, W) of the first image of a step in every pose, undone; {} without a segmenter."""
    s = segmenter_for(measured, plan, step, 0, None if measured.segmenter else (IDENTITY,))
    if s is None:
        return {}
    return {g.name: g.undo(labels_of(s, g.apply(step.fitted[0]))) for g in D4}
