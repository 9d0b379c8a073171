"""Models of Hugging Face's transformers: which spec goes into which part of them."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from vispe.encodings.registry import Spec, list_encodings
from vispe.errors import InputError, OptionError, UnknownEncoding, UnsupportedHost, did_you_mean
from vispe.hosts.transformers.diagnosis import names_of, names_scheme, refusal
from vispe.hosts.transformers.language.convert import convert_vlm, describe_vlm, is_vlm, restore_vlm
from vispe.hosts.transformers.language.families import inner_of
from vispe.hosts.transformers.saving import config_record
from vispe.hosts.transformers.subclasses import Named, positioned, stock_of
from vispe.multimodal import list_schemes

KEPT = ("learn", "rope")  # words of a sum that keep what a tower has of its own


class Around:
    """Mixed into the class of a model that has a converted tower inside, so that the class builds such models."""


def convert_transformers(
    model: nn.Module, spec: Spec, *, keep_abs: bool = False, keep_rope: bool = False, **options: Any
) -> None:
    """Put a position scheme into a language model, or an encoding into a vision tower, whichever the spec names.

    Raises:
        OptionError: what is to be kept of a tower was given with a position scheme.
        UnsupportedHost: a position scheme was given for a model without a language model.
    """
    if not names_scheme(spec):
        if is_vlm(model):
            _check_names(spec)
        _vision().convert_vision(model, spec, keep_abs=keep_abs, keep_rope=keep_rope, **options)
        _finish(model)
        return
    if keep_abs or keep_rope:
        raise OptionError(
            "keep_abs and keep_rope belong to vision towers; a position scheme replaces the one before."
        )
    if not is_vlm(model):
        raise UnsupportedHost(refusal(model, spec))
    _convert_language(model, spec, **options)
    _finish(model)


def _convert_language(model: nn.Module, spec: Any, **options: Any) -> None:
    """Put a position scheme into a model, whose class says so from then on."""
    around = _bare(model)
    try:
        convert_vlm(model, spec, **options)
    except BaseException:
        model.__class__ = around
        raise


def _finish(model: nn.Module) -> None:
    """Let configuration and class of a converted model say what it has."""
    config_record.write(model)
    if stock_of(type(model)) is None and config_record.names(model):
        model.__class__ = positioned(type(model), Around)


def _bare(model: nn.Module) -> type:
    """Take `Around` off a model and return the class that it had."""
    had = type(model)
    if Around in had.__bases__:
        model.__class__ = stock_of(had)
    return had


def convert_named(model: nn.Module) -> None:
    """Put into a model what its configuration names and it does not have yet.

    Raises:
        InputError: the configuration names nothing.
    """
    if not config_record.names(model):
        raise InputError(
            f"vispe.convert was given no encoding or position scheme, and the configuration of this "
            f"{type(model).__name__} names none; say which, as in vispe.convert(model, 'mrope_i')."
        )
    new = _put_named(model)
    if new:
        warnings.warn(
            f"{new} weights of the encoding were made anew, not loaded; vispe.from_pretrained loads those that were "
            "saved.",
            UserWarning,
            stacklevel=3,
        )


def complete(model: nn.Module, asked: type) -> None:
    """Convert a model that was built by calling the class of a converted one, where its configuration says how.

    Raises:
        InputError: it was to be loaded converted, and its configuration names nothing.
    """
    if config_record.names(model):
        _put_named(model)
    elif Named in asked.__bases__:
        raise InputError(
            f"The configuration of {model.config.name_or_path or type(model).__name__} names no encoding or position "
            f"scheme of vispe; load it with {type(model).__name__}.from_pretrained, and convert it then."
        )


def _put_named(model: nn.Module) -> int:
    """Convert the parts of a model that are not as its configuration names them; return the weights that are new."""
    new = 0
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)  # not that of the model which is being built
    try:
        with torch.device("cpu"), warnings.catch_warnings():
            # text is as the model was trained to read it, whatever other models of the class were trained to
            warnings.filterwarnings("ignore", ".*does not encode text as", UserWarning)
            for part, entry in list(config_record.missing(model)):
                if "scheme" in entry:
                    whole = model if is_vlm(model) and inner_of(model) is part else part
                    more = {name: entry.get(name) for name in ("parallel", "self_extend")}
                    _convert_language(whole, entry["scheme"], late_rotation=entry["late_rotation"], **more)
                else:
                    new += _vision().convert_as_named(part, entry)
    finally:
        torch.set_default_dtype(dtype)
    _finish(model)
    return new


def _check_names(spec: Spec) -> None:
    """Raise `UnknownEncoding` for a name that is neither that of an encoding nor that of a scheme."""
    known = [*list_encodings(), *list_schemes()]
    for name in (name.partition(".")[0] for name in names_of(spec)):
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
    _bare(model)
    config_record.erase(model)


def describe_transformers(model: nn.Module) -> str:
    """Return what is attached where, in the language model and in the vision tower."""
    lines = [describe_vlm(model)] if is_vlm(model) else []
    try:
        _vision().vision_tower_of(model)
    except UnsupportedHost:
        return "\n".join(lines) or f"{type(model).__name__} without a part that vispe knows."
    return "\n".join([*lines, _vision().describe_vision(model)])


def _vision() -> Any:
    """Return `vispe.hosts.transformers.vision.convert`, which a language model alone does not need."""
    from vispe.hosts.transformers.vision import convert

    return convert
