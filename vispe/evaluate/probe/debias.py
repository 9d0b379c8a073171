"""Removing positional content from features after the fact: a linear subspace, or chosen channels.

In published tables neither brings a positional probe near 0; they are the baselines that a retrofit is compared with.
`vispe.evaluate.probe.baselines` measures what they leave and what they cost. Source: the baselines of dino-saw
(tldr-group, arXiv 2603.16840).
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from vispe.errors import OptionError, ShapeError


def svd_debias(
    feats: Tensor | np.ndarray, noise_feats: Tensor | np.ndarray, k: int = 16
) -> Tensor | np.ndarray:
    """Project out of features the directions in which the features of a blank image vary over its patches.

    The features of the blank image get unit norm per patch and lose their spatial mean; their k leading left
    singular vectors B (C, k) are removed from the unit-norm features, f - B Bᵀ f, which get unit norm again.
    Feature norms are lost. Directions without any variance (a model without position on a blank image) are
    never removed.

    Args:
        feats: features to debias, (b, C, h, w).
        noise_feats: features of a blank (black, then normalised) image, (n, C, p) or (n, C, h, w); several
            images are centred one by one and pooled.
        k: directions to remove, at most min(C, n·p).

    Returns:
        Debiased features of unit norm (0 where nothing is left), of the type, dtype and shape of `feats`;
        computed in float64.

    Raises:
        ShapeError: wrong number of axes, or different numbers of channels.
        OptionError: `k` out of range.

    >>> svd_debias(torch.ones(1, 3, 2, 2), torch.rand(1, 3, 4), k=1).shape
    torch.Size([1, 3, 2, 2])
    """
    x = torch.as_tensor(feats)
    noise = torch.as_tensor(noise_feats, device=x.device)
    if x.ndim != 4 or noise.ndim not in (3, 4) or noise.shape[1] != x.shape[1]:
        raise ShapeError(
            f"svd_debias needs feats (b, C, h, w) and noise_feats (n, C, p) of the same C, "
            f"got {tuple(x.shape)} and {tuple(noise.shape)}."
        )
    # what varies over the patches of a blank image can only be position
    noise = functional.normalize(noise.to(torch.float64).flatten(2), dim=1)
    noise = (noise - noise.mean(2, keepdim=True)).transpose(0, 1).flatten(1)
    if not 0 <= k <= min(noise.shape):
        raise OptionError(
            f"svd_debias can remove 0 to {min(noise.shape)} directions of {tuple(noise.shape)}, got k={k}."
        )
    u, s, _ = torch.linalg.svd(noise, full_matrices=False)
    kept = s[:k] > max(noise.shape) * torch.finfo(torch.float64).eps
    basis = u[:, :k][:, kept]
    unit = functional.normalize(x.to(torch.float64), dim=1)
    rest = unit - torch.einsum("ck,dk,bdhw->bchw", basis, basis, unit)
    # what is rounding is not magnified to unit norm
    result = functional.normalize(rest, dim=1, eps=1e-6).to(x.dtype)
    return result.numpy() if isinstance(feats, np.ndarray) else result


def blank_channels(feats: Tensor | np.ndarray, channels: Sequence[int], axis: int = 1) -> Tensor | np.ndarray:
    """Return a copy of the features in which the chosen channels are 0.

    Args:
        feats: features of any shape.
        channels: channel numbers, such as `ProbeResult.top_channels()`; for DINOv2 ViT-S with registers the
            published choice is 47, 113, 117, 359.
        axis: the channel axis.

    Raises:
        OptionError: a channel or axis that does not exist.

    >>> blank_channels(np.ones((1, 3)), [0, 2])
    array([[0., 1., 0.]])
    """
    if not -feats.ndim <= axis < feats.ndim:
        raise OptionError(
            f"blank_channels got axis={axis} for features of {feats.ndim} axes {tuple(feats.shape)}."
        )
    width = feats.shape[axis]
    if wrong := [c for c in channels if not 0 <= c < width]:
        raise OptionError(f"blank_channels can blank channels 0 to {width - 1}, got {wrong}.")
    result = feats.copy() if isinstance(feats, np.ndarray) else feats.clone()
    index = [slice(None)] * feats.ndim
    index[axis] = list(channels)
    result[tuple(index)] = 0
    return result
