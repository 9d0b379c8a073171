"""Metadata of encodings: kinds, axes, options, presets, information and invariances."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vispe.encodings.base import (
    HOST_FACTS,
    INFORMATION,
    INVARIANCES,
    Encoding,
)
from vispe.encodings.registry import KINDS, check_term, encoding_class, encoding_classes, natural_order
from vispe.errors import OptionError, did_you_mean


@dataclass(frozen=True)
class EncodingInfo:
    """Metadata of an encoding.

    Attributes:
        name: name in the registry.
        kinds: any of additive, rotary, bias, mixing, positions.
        ndim: numbers of axes that it accepts.
        summary: first line of its docstring.
        paper: title and link.
        year: of publication.
        presets: preset name to its options.
        options: option name to its default; options without default are None.
        extrapolates: whether new grids work without resampling.
        fused: whether its bias has a form, such as a table of offsets, that needs no n x n mask.
        encodes: information that it provides: any of distance, direction, position, content.
        invariant: transformations that leave its contribution to attention between patches unchanged, with default
            options: any of translation, quarter_turns (of a square grid), reflection, rotation (by any angle).

    Example:
        >>> info = encoding_info("alibi2d")
        >>> info.kinds, info.ndim, info.fused
        (('bias',), (2,), True)
    """

    name: str
    kinds: tuple[str, ...]
    ndim: tuple[int, ...]
    summary: str
    paper: str
    year: int
    presets: dict[str, dict[str, Any]]
    options: dict[str, Any]
    extrapolates: bool
    fused: bool
    encodes: tuple[str, ...]
    invariant: tuple[str, ...]


def _invariant(cls: type[Encoding], preset: str) -> tuple[str, ...]:
    return cls.preset_invariant.get(preset, cls.invariant)


def list_encodings(
    filter: str | Sequence[str] = "*",
    kind: str | None = None,
    ndim: int | None = None,
    exclude: str | Sequence[str] = (),
    *,
    encodes: str | None = None,
    invariant: str | None = None,
) -> list[str]:
    """Return the names of encodings, in natural sort order.

    Args:
        filter: wildcard or several; one with a dot lists presets (``'alibi2d.*'``).
        kind: only this kind: additive, rotary, bias, mixing or positions (samplers).
        ndim: only those that accept this number of axes.
        exclude: wildcard or several to exclude.
        encodes: only those that provide this information: distance, direction, position or content.
        invariant: only those whose contribution to attention between patches is invariant to this: translation,
            quarter_turns (of a square grid), reflection or rotation (by any angle). Presets are listed if the
            encoding with its default options is not invariant.

    Raises:
        OptionError: the kind, information or invariance does not exist.

    Example:
        >>> list_encodings("rpb*", ndim=2)
        ['rpb', 'rpb_cpb']
    """
    for name, value, choices in (
        ("kind", kind, KINDS),
        ("encodes", encodes, INFORMATION),
        ("invariant", invariant, INVARIANCES),
    ):
        if value is not None and value not in choices:
            raise OptionError(
                f"{name} must be one of {', '.join(choices)}, got {value!r}.{did_you_mean(value, choices)}"
            )
    included = [filter] if isinstance(filter, str) else list(filter)
    excluded = [exclude] if isinstance(exclude, str) else list(exclude)
    names: list[str] = []
    for name, cls in encoding_classes().items():
        if (
            (kind and not issubclass(cls, KINDS[kind]))
            or (ndim is not None and ndim not in cls.ndim)
            or (encodes and encodes not in cls.encodes)
        ):
            continue
        # presets may have other invariances than the encoding
        full = {name: cls.invariant, **{f"{name}.{p}": _invariant(cls, p) for p in cls.presets}}
        for n, invariances in full.items():
            if invariant and invariant not in invariances:
                continue
            # the encoding with default options is not invariant
            preset_only = bool(invariant) and invariant not in cls.invariant
            # presets match filters with a dot only, unless just the preset has the invariance
            names += [
                n for f in included if ("." in f) >= ("." in n and not preset_only) and fnmatch.fnmatch(n, f)
            ]
    names = [n for n in names if not any(fnmatch.fnmatch(n, f) for f in excluded)]
    return natural_order(set(names))


def encoding_info(name: str) -> EncodingInfo:
    """Return the metadata of an encoding.

    A preset such as ``'alibi2d.local'`` gives the same with its values as defaults of the options.

    Raises:
        UnknownEncoding: the name or preset does not exist.
        OptionError: the entry point of a plugin is not an encoding.

    Example:
        >>> encoding_info("alibi2d").kinds
        ('bias',)
    """
    preset = check_term(name, {})
    cls = encoding_class(preset.pop("name"))
    parameters = inspect.signature(cls).parameters.values()
    options = {
        p.name: preset.get(p.name, None if p.default is p.empty else p.default)
        for p in parameters
        if p.name not in HOST_FACTS
    }
    return EncodingInfo(
        name=cls.name,
        kinds=tuple(k for k, base in KINDS.items() if issubclass(cls, base)),
        ndim=cls.ndim,
        summary=(inspect.getdoc(cls) or "").partition("\n")[0],
        paper=cls.paper,
        year=cls.year,
        presets={k: dict(v) for k, v in cls.presets.items()},
        options=options,
        extrapolates=cls.extrapolates,
        fused=cls.fused,
        encodes=cls.encodes,
        invariant=_invariant(cls, name.partition(".")[2]),
    )
