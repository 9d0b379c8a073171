"""Validation of the card of a model file: required entries, their types and ranges."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vispe.errors import InputError, counted
from vispe.images.labels.class_names import LONGEST, has_controls
from vispe.images.labels.json_files import unique_keys
from vispe.images.normalize import MODES
from vispe.segment.classify.calibration import MAX_TEMPERATURE

_LARGEST_SIGMA = 1000.0  # pixels
_CARD_BYTES = 64_000_000
_TEXT, _DEPTH = 4096, 16  # upper bounds: characters of a string in a card, and nesting depth


def read_card(data: bytes) -> object:
    """Parse the card of a model file; ValueError if it is not JSON, too long, or has duplicate keys."""
    if len(data) > _CARD_BYTES:
        raise ValueError(f"its card has {len(data)} bytes, more than {_CARD_BYTES}")
    return json.loads(data, object_pairs_hook=unique_keys)


def _check_texts(path: Path, value: object, where: str, depth: int = 0) -> None:
    """Reject overlong strings, extreme numbers and deeply nested objects."""
    problem = None
    if depth > _DEPTH:
        problem = f"is nested more than {_DEPTH} deep"
    elif isinstance(value, str) and len(value) > _TEXT:
        problem = f"is a string of {counted(len(value), 'character')}, more than {_TEXT}"
    elif isinstance(value, int) and abs(value) >= 1 << 63:
        problem = "is a number beyond 2^63"
    elif isinstance(value, float) and not math.isfinite(value):
        problem = "is not a finite number"
    if problem is not None:
        raise InputError(f"{path} was rejected: {where[:80]} in its card {problem}.")
    if isinstance(value, Mapping):
        for key, element in value.items():
            _check_texts(path, key, f"a key of {where}", depth + 1)
            _check_texts(path, element, str(key), depth + 1)
    elif isinstance(value, list):
        for element in value:
            _check_texts(path, element, where, depth + 1)


def check_card(path: Path, card: Mapping[str, Any]) -> None:
    """Reject a card with missing entries, or entries of the wrong type or out of range.

    Raises:
        InputError: names the entry.
    """
    names, count = card.get("classes"), card.get("n_classes")

    def require(key: str, valid: bool, expected: str) -> None:
        if not valid:
            value_text = repr(card.get(key))[:80]
            raise InputError(
                f"{path} is damaged: {key}={value_text} in its card must be {expected}. Train the model again."
            )

    require("classifier", isinstance(card.get("classifier"), str), "a name")
    require("n_classes", _is_integer(count, 1, 255), "an integer from 1 to 255")
    texts = _are_strings(names) and len(names) == count and all(names) and len(set(names)) == len(names)
    require("classes", texts, f"{count} distinct names")
    require("classes", all(len(name) <= LONGEST for name in names), f"names of up to {LONGEST} characters")
    require("classes", not any(map(has_controls, names)), "names without control characters")
    colors, clip, channels = card.get("colors"), card.get("clip"), card.get("channels", 0)
    valid = colors is None or _is_list(
        colors, count, lambda c: _is_list(c, 3, lambda v: _is_integer(v, 0, 255))
    )
    require("colors", valid, f"{counted(count, 'colour')} of three integers from 0 to 255, or null")
    require("normalize", card.get("normalize") in MODES, " or ".join(MODES))
    require("clip", _is_list(clip, 2, _is_finite) and 0 <= clip[0] < clip[1] <= 100, "two percentiles")
    require("channels", channels is None or _is_integer(channels, 1, 10_000), "a number of channels")
    require("seed", _is_integer(card.get("seed"), 0, (1 << 32) - 1), "an integer below 2^32")
    temperature = card.get("temperature", 1.0)
    require(
        "temperature",
        _is_finite(temperature) and 1 <= temperature <= MAX_TEMPERATURE,
        f"a number from 1 to {MAX_TEMPERATURE}",
    )
    require("training", isinstance(card.get("training"), dict), "an object")
    features = card.get("features")
    require("features", isinstance(features, dict), "an object")
    for key in ("kind", "model", "pos_embed", "weights", "fingerprint", "readout"):
        value = features.get(key)
        valid = value is None or (isinstance(value, str) and value.isprintable() and 0 < len(value) < 4096)
        require("features", valid, f"an object whose {key} is a string or null")
    for key in ("tile", "components", "token_stride", "token_shifts"):
        valid = features.get(key) is None or _is_integer(features[key], 1, 1 << 20)
        require("features", valid, f"an object whose {key} is an integer, or null")
    blocks = features.get("layers")
    valid = blocks is None or (
        _is_list(blocks, None, lambda b: _is_integer(b, -4096, 4095)) and len(blocks) <= 4096
    )
    require("features", valid, "an object whose layers is a list of integers, or null")
    sigmas = features.get("sigmas", [])
    valid = _is_list(sigmas, None, lambda s: _is_finite(s) and 0 < s <= _LARGEST_SIGMA) and len(sigmas) <= 64
    require("features", valid, f"an object whose sigmas are up to 64 numbers up to {_LARGEST_SIGMA:g}")
    objects = card.get("object_classes")
    require(
        "object_classes", objects is None or _is_object_classes(objects), "an object with names and options"
    )
    _check_texts(path, card, "the object")


def _is_object_classes(entry: object) -> bool:
    """Return whether an entry of a card describes a classifier of objects; `ObjectOptions` checks its options."""
    if not isinstance(entry, dict) or not isinstance(entry.get("facts"), dict):
        return False
    limits = entry["facts"].get("mean_grey", [0, 0])
    if not isinstance(entry["facts"].get("examples"), dict) or not _is_list(limits, 2, _is_finite):
        return False
    names, options = entry.get("names"), entry.get("options")
    texts = _are_strings(names) and 2 <= len(names) <= 255 and len(set(names)) == len(names)
    valid = texts and all(0 < len(name) <= LONGEST and not has_controls(name) for name in names)
    valid = valid and entry.get("unit") in ("px", "um") and isinstance(entry.get("volumes"), bool)
    return valid and isinstance(options, dict) and _are_strings(options.get("classes"))


def _is_integer(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_list(value: object, count: int | None, fits: Callable[[Any], bool]) -> bool:
    """Return whether a value is a list of `count` elements (None: any number) that all satisfy `fits`."""
    sized = isinstance(value, list) and count in (None, len(value))
    return sized and all(map(fits, value))


def _is_finite(value: object) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) < 1e300
        and math.isfinite(value)
    )


def _are_strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(v, str) for v in value)
