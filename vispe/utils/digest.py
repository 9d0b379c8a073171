"""Digest of tensors, to recognise the data and weights of an interrupted run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor


def tensor_digest(tensors: Iterable[Tensor]) -> str:
    """Return a sha256 of shapes, dtypes and values of tensors, in order.

    >>> tensor_digest([torch.zeros(2)]) == tensor_digest([torch.zeros(1, 2)])
    False
    """
    digest = hashlib.sha256()
    for tensor in tensors:
        values = tensor.detach().cpu().contiguous()
        digest.update(f"{tuple(values.shape)} {values.dtype}".encode())
        digest.update(values.flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
