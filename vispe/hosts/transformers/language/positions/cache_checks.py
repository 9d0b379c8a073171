"""Errors for KV caches that a converted model cannot continue."""

from __future__ import annotations

from typing import Any

import torch

from vispe.errors import InputError
from vispe.hosts.transformers.language.positions.kv_cache import PREFIX
from vispe.hosts.transformers.language.positions.sequence_state import SequenceState


def check_filled_here(cache: Any) -> None:
    """Raise `InputError` if a cache contains tokens without a state."""
    if cache is not None and cache.get_seq_length() and not hasattr(cache, PREFIX):
        raise InputError(
            "The cache must be filled by a model with this position scheme, got one filled by another model. Fill a "
            "new cache with this model, from input_ids and the grids of the images."
        )


def check_conversion(state: SequenceState | None, conversion: tuple[Any, ...]) -> None:
    """Raise `InputError` if the keys in a cache were rotated by another conversion.

    Args:
        state: state of the cache, or None.
        conversion: identity of the conversion of the model, `TextConversion.of_keys`.
    """
    if torch.compiler.is_compiling() or state is None or state.conversion is None:
        return
    if state.conversion == conversion or (
        state.conversion[0] is None and state.conversion[1:] == conversion[1:]
    ):
        return
    raise InputError(
        f"The cache must be filled by a model with this position scheme and these options of vispe.convert, "
        f"{_conversion_text(conversion)}, got a cache of {_conversion_text(state.conversion)}. Fill a new cache with "
        "this model."
    )


def check_end(state: SequenceState | None) -> None:
    """Raise `InputError` if the position of the token after a cache is unknown."""
    if state is not None and state.ends_unknown:
        raise InputError(
            "The position after the cached tokens is unknown: position_ids of an earlier call were not the coordinates "
            "of the scheme and ended with an image, got a call without position_ids. Pass the coordinates of its "
            "tokens, (axes, b, s)."
        )


def _conversion_text(conversion: tuple[Any, ...]) -> str:
    scheme, late_rotation, parallel = conversion
    options = {"late_rotation": late_rotation or None, "parallel": parallel}
    named = [f"{name}={value!r}" for name, value in options.items() if value is not None]
    return " with ".join([str(scheme or "any scheme"), *([", ".join(named)] if named else [])])
