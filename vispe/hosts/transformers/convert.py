"""Conversion of models of Hugging Face transformers: position schemes and encodings of vision towers."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from vispe.encodings.metadata import list_encodings
from vispe.encodings.registry import Spec
from vispe.encodings.spec import SCHEME_NAMES
from vispe.errors import InputError, OptionError, UnknownEncoding, UnsupportedHost, counted, did_you_mean
from vispe.hosts.transformers.diagnosis import names_of, names_scheme, refusal
from vispe.hosts.transformers.language.conversion_record import describe_vlm
from vispe.hosts.transformers.language.convert import (
    convert_vlm,
    is_vision_language_model,
    restore_vlm,
)
from vispe.hosts.transformers.language.families import model_inside
from vispe.hosts.transformers.saving import config_record
from vispe.hosts.transformers.subclasses import Named, converted_subclass, stock_of
from vispe.multimodal import list_schemes

KEYWORDS = ("learn", "rope")  # terms of a sum with which a tower's own position information stays in use


class Around:
    """Mixin for the class of a model with a converted part; calling the class builds a converted model."""


def convert_transformers(
    model: nn.Module, spec: Spec, *, keep_abs: bool = False, keep_rope: bool = False, **options: Any
) -> None:
    """Convert the language model to a position scheme, or the vision tower to an encoding, depending on the spec.

    Raises:
        OptionError: `keep_abs` or `keep_rope` is set with a position scheme.
        UnsupportedHost: the spec is a position scheme, and the model has no language model that supports it.
    """
    if not names_scheme(spec):
        if is_vision_language_model(model):
            _check_names(spec)
        _vision().convert_vision(model, spec, keep_abs=keep_abs, keep_rope=keep_rope, **options)
        _finish(model)
        return
    if keep_abs or keep_rope:
        raise OptionError(
            "keep_abs and keep_rope are options of vision towers, got a position scheme. Omit them; a scheme replaces "
            "the model's own."
        )
    if not is_vision_language_model(model):
        raise UnsupportedHost(refusal(model, spec))
    _convert_language(model, spec, **options)
    _finish(model)


def _convert_language(model: nn.Module, spec: Any, **options: Any) -> None:
    """Convert a language model to a position scheme; its class is unchanged on errors."""
    cls = _remove_around(model)
    try:
        convert_vlm(model, spec, **options)
    except BaseException:
        model.__class__ = cls
        raise


def _finish(model: nn.Module) -> None:
    """Record the conversion in the configuration and the class of a model."""
    config_record.write(model)
    if stock_of(type(model)) is None and config_record.names(model):
        model.__class__ = converted_subclass(type(model), Around)


def _remove_around(model: nn.Module) -> type:
    """Remove the mixin `Around` from the class of a model, and return the previous class."""
    previous = type(model)
    if Around in previous.__bases__:
        model.__class__ = stock_of(previous)
    return previous


def convert_named(model: nn.Module) -> None:
    """Convert a model to the encodings and position scheme that its configuration names.

    Raises:
        InputError: the configuration names no encoding or scheme.
    """
    if not config_record.names(model):
        raise InputError(
            "vispe.convert: without a spec, the configuration of the model must name an encoding or position scheme, "
            f"got that of a {type(model).__name__} without one. Pass a spec, as in vispe.convert(model, 'mrope_i')."
        )
    new = _convert_missing(model)
    if new:
        warnings.warn(
            f"{counted(new, 'weight')} of the encoding {'was' if new == 1 else 'were'} initialised, not loaded. Load "
            "saved ones with vispe.from_pretrained.",
            UserWarning,
            stacklevel=3,
        )


def complete(model: nn.Module, requested: type) -> None:
    """Convert a model that was built by calling the class of a converted one, as its configuration names.

    Raises:
        InputError: the model was loaded by `vispe.from_pretrained`, and its configuration names no encoding
            or scheme.
    """
    if config_record.names(model):
        _convert_missing(model)
    elif Named in requested.__bases__:
        raise InputError(
            "vispe.from_pretrained: the configuration must name an encoding or position scheme of vispe, got that of "
            f"{model.config.name_or_path or type(model).__name__} without one. Load it with "
            f"{type(model).__name__}.from_pretrained, and call vispe.convert."
        )


def _convert_missing(model: nn.Module) -> int:
    """Convert the parts that differ from the configuration; return the number of new weights."""
    new = 0
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)  # transformers may have set another default
    try:
        with torch.device("cpu"), warnings.catch_warnings():
            # the model was trained with this scheme, so the warning about text of the stock model does not apply
            warnings.filterwarnings("ignore", ".*does not encode text as", UserWarning)
            for part, entry in list(config_record.missing(model)):
                if "scheme" in entry:
                    outer = model if is_vision_language_model(model) and model_inside(model) is part else part
                    options = {name: entry.get(name) for name in ("parallel", "self_extend")}
                    _convert_language(outer, entry["scheme"], late_rotation=entry["late_rotation"], **options)
                else:
                    new += _vision().convert_as_named(part, entry)
    finally:
        torch.set_default_dtype(dtype)
    _finish(model)
    return new


def _check_names(spec: Spec) -> None:
    """Raise `UnknownEncoding` for a name that belongs neither to an encoding nor to a scheme."""
    known = [*list_encodings(), *sorted(SCHEME_NAMES)]
    for name in (name.partition(".")[0] for name in names_of(spec)):
        if name not in (*known, *KEYWORDS):
            raise UnknownEncoding(
                f"spec must name an encoding of the vision tower or a position scheme of the language model, got "
                f"{name!r}.{did_you_mean(name, known)} Position schemes: {', '.join(list_schemes())}; encodings: see "
                "vispe.list_encodings()."
            )


def restore_transformers(model: nn.Module) -> None:
    """Restore the model's own position scheme, and the own position information of its vision tower.

    Raises:
        UnsupportedHost: neither language model nor vision tower is converted.
    """
    scheme = is_vision_language_model(model) and stock_of(type(model_inside(model))) is not None
    if scheme:
        restore_vlm(model)
    try:
        _vision().restore_vision(model)
    except UnsupportedHost:
        if not scheme:
            raise
    _remove_around(model)
    config_record.erase(model)


def describe_transformers(model: nn.Module) -> str:
    """Return a summary of the conversion of the language model and the vision tower."""
    lines = [describe_vlm(model)] if is_vision_language_model(model) else []
    try:
        _vision().vision_tower_of(model)
    except UnsupportedHost:
        return "\n".join(lines) or f"{type(model).__name__} without a part that vispe supports."
    return "\n".join([*lines, _vision().describe_vision(model)])


def _vision() -> Any:
    """Return `vispe.hosts.transformers.vision.convert`, imported on demand, as language models do not need it."""
    from vispe.hosts.transformers.vision import convert

    return convert
