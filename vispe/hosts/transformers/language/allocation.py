"""Allocation of the channel pairs of a language model to the axes of a position scheme."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vispe.errors import OptionError, counted
from vispe.hosts.transformers.language.conversion_record import kind_key, schemes_of
from vispe.hosts.transformers.language.families import family_of, language_model_of
from vispe.hosts.transformers.language.rotary_detection import DetectedRotary
from vispe.multimodal import PerLayerSchemes, Scheme, create_scheme
from vispe.multimodal.allocation import ZERO
from vispe.multimodal.concatenated_scheme import ConcatenatedScheme
from vispe.multimodal.properties import is_text_exact


def allocations(
    scheme: Scheme, rotaries: dict[str, DetectedRotary], heads: dict[str, int]
) -> tuple[dict[str, Tensor], bool]:
    """Return the axis of each channel pair in each kind of layers, and whether text is encoded as before."""
    allocated: dict[str, Tensor] = {}
    unchanged = True
    for number, part, first in schemes_of(scheme):
        for kind, rotary in rotaries.items():
            axes = _allocated(part, rotary, heads[kind])
            allocated[kind_key(kind, number)] = torch.where(axes >= 0, axes + first, axes)
            unchanged &= is_text_exact(part, rotary.num_rotated, heads[kind])
    return allocated, unchanged


def _allocated(scheme: Scheme, rotary: DetectedRotary, heads: int) -> Tensor:
    """Return the axis of each pair; `ZERO` for pairs that the model does not rotate."""
    axes = scheme.allocation(rotary.num_rotated, heads)
    if not rotary.unrotated:
        return axes
    rotated = [n for n in range(rotary.pairs) if n not in rotary.unrotated]
    padded = axes.new_full((*axes.shape[:-1], rotary.pairs), ZERO)
    padded[..., rotated] = axes
    return padded


def scheme_of_each_layer(scheme: Scheme, text: Any) -> Sequence[int | None]:
    """Return the index of the scheme of each layer; None if one scheme is used in all layers."""
    if not isinstance(scheme, ConcatenatedScheme):
        return [None] * len(text.layers)
    if len(scheme.layers.of_layer) != len(text.layers):
        raise OptionError(
            f"{type(text).__name__} needs one scheme for each of {counted(len(text.layers), 'layer')}, got schemes for "
            f"{len(scheme.layers.of_layer)}."
        )
    return scheme.layers.of_layer


def sectioned(scheme: Scheme, inner: Any, rotaries: dict[str, DetectedRotary]) -> Scheme:
    """Return the scheme after `with_host_sections`, applied to the scheme of each layer."""
    if not isinstance(scheme, ConcatenatedScheme):
        return with_host_sections(scheme, inner, rotaries)
    schemes = tuple(with_host_sections(part, inner, rotaries) for part in scheme.layers.schemes)
    return ConcatenatedScheme(PerLayerSchemes(schemes, scheme.layers.of_layer))


def with_host_sections(scheme: Scheme, inner: Any, rotaries: dict[str, DetectedRotary]) -> Scheme:
    """Return the scheme with the sections of the host, if these have the same meaning."""
    host = getattr(language_model_of(inner).rotary_emb, "mrope_section", None)
    pairs = next(iter(rotaries.values())).pairs
    if host is None or scheme.options().get("sections") is not None or sum(host) != pairs:
        return scheme
    stock = family_of(inner.config).own(inner.config)
    if scheme.name != stock.name or "sections" not in stock.options():
        return scheme
    # configurations may omit sections of the last axes, which are then 0
    padded = (*host, *[0] * (3 - len(host)))
    sections = stock.options().get("sections") or padded
    # interleaved axes may exceed the number of pairs; the host clips them
    over = any(axis + 3 * (sections[axis] - 1) >= pairs for axis in (1, 2))
    return create_scheme(
        scheme, sections=sections, **({"clip": True} if over and "clip" in stock.options() else {})
    )
