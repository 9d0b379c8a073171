"""Camera matrices of `gta` and `prope`: one per view or per token, and the projection from the world to the image."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from vispe.attention.precision import exact_product
from vispe.errors import ShapeError, counted
from vispe.grid import PerToken, Positions

EXTRINSIC = "extrinsic"
INTRINSIC = "intrinsic"
IMAGE_SIZE = "image_size"

_inv = cast("Callable[[Tensor], Tensor]", torch.linalg.inv)  # pyright: ignore[reportUnknownMemberType]


def inverse(matrices: Tensor) -> Tensor:
    """Return inverse matrices (..., s, s) in the dtype of `matrices`, computed in float64 where it exists."""
    # world coordinates may be large compared with the distances between cameras
    exact = matrices if matrices.device.type == "mps" else matrices.double()
    return _inv(exact).to(matrices.dtype)


def per_token(pos: Positions, views: Tensor, owner: str, noun: str, size: int) -> PerToken:
    """Return matrices (b or 1, views, size, size) repeated for the tokens of each view; the identity for the prefix.

    Args:
        pos: positions of all tokens, in view-major order after the prefix.
        views: one matrix per view.
        owner: name of the encoding, for errors.
        noun: name of the matrices, for errors.
        size: rows of a matrix.

    Raises:
        ShapeError: the matrices have another shape, the tokens are not equally many per view, or some were dropped.
    """
    prefix = pos.grid.prefix if pos.grid else 0
    patches = pos.tokens - prefix
    is_valid = views.ndim == 4 and tuple(views.shape[2:]) == (size, size) and views.is_floating_point()
    if not is_valid or not views.shape[1] or patches % views.shape[1] or pos.index is not None:
        raise ShapeError(
            f"{owner} needs {noun} (b, views, {size}, {size}) with equally many of the {counted(patches, 'token')} "
            f"per view, set before tokens are dropped (prepare), got {tuple(views.shape)} {views.dtype} for {pos}."
        )
    each = views.repeat_interleave(patches // views.shape[1], 1)
    eye = torch.eye(size, dtype=views.dtype, device=views.device).expand(len(views), prefix, size, size)
    return PerToken(torch.cat([eye, each], 1), (1,))


def normalized(intrinsic: Tensor, height: float, width: float) -> Tensor:
    """Return intrinsics (..., 3, 3) in units of the image, with the origin in its centre.

    Focal lengths become f_x / width and f_y / height; the principal point c_x / width - 1/2 and c_y / height - 1/2.

    Args:
        intrinsic: (..., 3, 3), in pixels.
        height: of the image in pixels.
        width: likewise.
    """
    to_unit = intrinsic.new_tensor([[1 / width, 0, -0.5], [0, 1 / height, -0.5], [0, 0, 1]])
    return exact_product(to_unit, intrinsic)


def projection(extrinsic: Tensor, intrinsic: Tensor | None) -> Tensor:
    """Return the projections (..., 4, 4) from homogeneous world coordinates to the image, K E with K lifted to 4 x 4.

    Args:
        extrinsic: camera from world, (..., 4, 4).
        intrinsic: normalised intrinsics (..., 3, 3), or None for the camera frame instead of the image.
    """
    if intrinsic is None:
        return extrinsic
    # K lifted to 4 x 4: diag(K, 1)
    corner = F.pad(intrinsic.new_ones(1, 1), (3, 0, 3, 0))
    return exact_product(F.pad(intrinsic, (0, 1, 0, 1)) + corner, extrinsic)
