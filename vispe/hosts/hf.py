"""Models of Hugging Face's transformers: which spec goes into which part of them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from torch import nn

from vispe.errors import OptionError, UnknownEncoding, UnsupportedHost, did_you_mean
from vispe.hosts.hf_classes import stock_of
from vispe.hosts.hf_vlm import convert_vlm, describe_vlm, inner_of, is_vlm, restore_vlm
from vispe.multimodal import Scheme, list_schemes
from vispe.registry import Spec, list_encodings
from vispe.spec_text import parse_text

KEPT = ("learn", "rope")  # words of a sum that keep what a tower has of its own


def convert_transformers(
    model: nn.Module, spec: Spec, *, keep_abs: bool = False, keep_rope: bool = False, **options: Any
) -> None:
    """Put a position scheme into a language model, or an encoding into a vision tower, whichever the spec names.

    Raises:
        OptionError: what is to be kept of a tower was given with a position scheme.
        UnsupportedHost: a position scheme was given for a model without a language model.
    """
    if not _names_scheme(spec):
        if is_vlm(model):
            _check_names(spec)
        _vision().convert_vision(model, spec, keep_abs=keep_abs, keep_rope=keep_rope, **options)
        return
    if keep_abs or keep_rope:
        raise OptionError(
            "keep_abs and keep_rope belong to vision towers; a position scheme replaces the one before."
        )
    if not is_vlm(model):
        raise UnsupportedHost(
            f"The position scheme {spec!s} goes into a vision-language model; a {type(model).__name__} has no "
            "language model inside."
        )
    convert_vlm(model, spec, **options)


def _names_scheme(spec: Spec) -> bool:
    """Whether a spec names a position scheme of multimodal sequences."""
    if isinstance(spec, Scheme):
        return True
    if isinstance(spec, Mapping):
        return spec.get("name") in list_schemes()
    return isinstance(spec, str) and any(name in list_schemes() for name, _ in parse_text(spec))


def _check_names(spec: Spec) -> None:
    """Raise `UnknownEncoding` for a name that is neither that of an encoding nor that of a scheme."""
    known = [*list_encodings(), *list_schemes()]
    for name in [n.partition(".")[0] for n, _ in parse_text(spec)] if isinstance(spec, str) else []:
        if name not in (*known, *KEPT):
            raise UnknownEncoding(
                f"There is no encoding for the vision tower and no position scheme for the language model called "
                f"{name!r}.{did_you_mean(name, known)} Schemes: {', '.join(list_schemes())}; encodings: see "
                "vispe.list_encodings()."
            )


def restore_transformers(model: nn.Module) -> None:
    """Give a model its own position scheme, and its vision tower its own encoding, back.

    Raises:
        UnsupportedHost: neither is converted.
    """
    scheme = is_vlm(model) and stock_of(type(inner_of(model))) is not None
    if scheme:
        restore_vlm(model)
    try:
        _vision().restore_vision(model)
    except UnsupportedHost:
        if not scheme:
            raise


def describe_transformers(model: nn.Module) -> str:
    """Return what is attached where, in the language model and in the vision tower."""
    lines = [describe_vlm(model)] if is_vlm(model) else []
    try:
        _vision().vision_tower_of(model)
    except UnsupportedHost:
        return "\n".join(lines) or f"{type(model).__name__} without a part that vispe knows."
    return "\n".join([*lines, _vision().describe_vision(model)])


def _vision() -> Any:
    """Return `vispe.hosts.hf_vision`, which a language model alone does not need."""
    return importlib.import_module("vispe.hosts.hf_vision")
