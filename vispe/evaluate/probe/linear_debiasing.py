"""Post-hoc debiasing of features: removal of a linear subspace, or of single channels.

In published tables neither reduces a positional probe to about 0; they are baselines for a retrofit.
`vispe.evaluate.probe.baselines` measures the remaining position and the cost. Source: the baselines of dino-saw
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
    """Remove from features the directions in which the features of a blank image vary over its patches.

    The features of the blank image are normalised per patch and centred over patches; their k leading left singular
    vectors B (C, k) are removed from the normalised features, f - B Bᵀ f, which are normalised again. Feature norms are
    lost. Directions without variance (a model without positional information on a blank image) are never removed.

    Args:
        feats: features to debias, (b, C, h, w).
        noise_feats: features of a blank (black, then normalised) image, (n, C, p) or (n, C, h, w); several
            images are centred separately and pooled.
        k: number of directions to remove, at most min(C, n·p).

    Returns:
        Debiased features of unit norm (0 where nothing remains), with the type, dtype and shape of `feats`;
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
            f"svd_debias: expected feats (b, C, h, w) and noise_feats (n, C, p) of the same C, "
            f"got {tuple(x.shape)} and {tuple(noise.shape)}. Permute the channels to axis 1."
        )
    basis = svd_basis(noise, k)
    unit = functional.normalize(x.to(torch.float64), dim=1)
    residual = unit - torch.einsum("ck,dk,bdhw->bchw", basis, basis, unit)
    # eps keeps rounding errors from being scaled to unit norm
    result = functional.normalize(residual, dim=1, eps=1e-6).to(x.dtype)
    return result.numpy() if isinstance(feats, np.ndarray) else result


def svd_basis(noise: Tensor, k: int) -> Tensor:
    """Return the directions (C, m) in which normalised features of a blank image vary over its patches, m at most `k`.

    Args:
        noise: features of blank images, (n, C, p) or (n, C, h, w).
        k: number of directions.

    Raises:
        OptionError: `k` out of range.

    >>> svd_basis(torch.eye(3)[None], 2).shape
    torch.Size([3, 2])
    """
    # any variation over the patches of a blank image is positional
    noise = functional.normalize(noise.to(torch.float64).flatten(2), dim=1)
    noise = (noise - noise.mean(2, keepdim=True)).transpose(0, 1).flatten(1)
    if not 0 <= k <= min(noise.shape):
        raise OptionError(
            f"svd_debias: k must be in 0 to {min(noise.shape)} for noise features {tuple(noise.shape)}, got {k}. Use a "
            "smaller k."
        )
    u, s, _ = torch.linalg.svd(noise, full_matrices=False)
    return u[:, :k][:, s[:k] > max(noise.shape) * torch.finfo(torch.float64).eps]


def blank_channels(feats: Tensor | np.ndarray, channels: Sequence[int], axis: int = 1) -> Tensor | np.ndarray:
    """Return a copy of the features with the given channels set to 0.

    Args:
        feats: features of any shape.
        channels: channel indices, such as `ProbeResult.top_channels()`; 47, 113, 117, 359 in the published tables for
            DINOv2 ViT-S with registers.
        axis: the channel axis.

    Raises:
        OptionError: a channel or axis that does not exist.

    >>> blank_channels(np.ones((1, 3)), [0, 2])
    array([[0., 1., 0.]])
    """
    if not -feats.ndim <= axis < feats.ndim:
        raise OptionError(
            f"blank_channels: axis must be valid for features {tuple(feats.shape)}, got {axis}. Use the channel axis."
        )
    width = feats.shape[axis]
    if wrong := [c for c in channels if not 0 <= c < width]:
        raise OptionError(
            f"blank_channels: channels must be in 0 to {width - 1}, got {wrong}. Use valid indices."
        )
    result = feats.copy() if isinstance(feats, np.ndarray) else feats.clone()
    index = [slice(None)] * feats.ndim
    index[axis] = list(channels)
    result[tuple(index)] = 0
    return result
