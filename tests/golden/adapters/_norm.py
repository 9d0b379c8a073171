"""Norm layers that cases name: "LayerNorm", "torch.nn.RMSNorm", "LayerNorm eps 1e-5"."""

import functools
import re

import timm.layers
from torch import nn


def norm_of(text, eps=None):
    """Return the class that a case names, or a factory with the eps given or parsed from the name."""
    name = re.search(r"\w*[Nn]orm\w*", str(text))
    norm = name and (getattr(nn, name[0], None) or getattr(timm.layers, name[0], None))
    if not norm:
        raise ValueError(f"unknown norm {text!r}")
    match = re.search(r"\beps\W*(\d[\d.]*(?:e[-+]?\d+)?)", str(text))
    eps = float(match[1]) if match else eps
    return norm if eps is None else functools.partial(norm, eps=eps)


def norm_of_blocks(case):
    """Return the factory of the norms of the blocks of a ViT."""
    return norm_of(case.config("norm_layer", None) or "LayerNorm", case.config("norm_eps", None))
