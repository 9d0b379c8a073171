"""Creation of encodings from specs and the facts of their host."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from vispe.encodings.base import HOST_FACTS, Biased, Encoding, Rotary
from vispe.encodings.compose import Compose
from vispe.encodings.parts.preparation import check_samplers
from vispe.encodings.registry import Spec, check_term, encoding_class, is_list, parse_spec
from vispe.errors import OptionError

_SIZES = ("dim", "num_heads", "head_dim", "depth")  # host facts that an encoding and its host must agree on


def create_encoding(spec: Spec, **options: Any) -> Encoding:
    """Build an encoding.

    Args:
        spec: see `vispe.encodings.registry`.
        **options: options of the encoding (for a single one), and the facts of the host that it needs:
            `dim` (width of the tokens), `num_heads`, `head_dim` (channels of a head, if it differs from
            dim / num_heads), `depth` (blocks) and `grid` (shape of the token grid; encodings with an
            option `axes` are built for its axes, unless `axes` is given). Facts that an encoding does not
            use are ignored; an unknown option is an error.

    Returns:
        The encoding, or a `Compose` for a sum.

    Raises:
        UnknownEncoding: the encoding or preset does not exist.
        OptionError: an option is unknown or has an invalid value, or a required fact is missing.
        UnsupportedCombination: the members of a sum cannot be combined.

    Example:
        >>> create_encoding("alibi2d(slopes=learned)", num_heads=4).config["slopes"]
        'learned'
    """
    facts = {k: options.pop(k) for k in HOST_FACTS if k in options}
    if isinstance(spec, Encoding):
        if options:
            raise OptionError(
                f"create_encoding cannot apply options to an instance, got {sorted(options)} and a {spec.name}. "
                "Pass them to its constructor."
            )
        _check_instance(spec, facts)
        return spec
    if is_list(spec) and len(spec) > 1:
        built = [create_encoding(member, **facts) for member in spec]  # instances are used unchanged
    elif is_list(spec):
        return create_encoding(spec[0], **facts, **options)
    else:
        terms = parse_spec(spec)
        # options apply to a single encoding; for a sum, the error below is raised
        built = [_build({**term, **(options if len(terms) == 1 else {})}, facts) for term in terms]
    if options and len(built) > 1:
        raise OptionError(
            f"create_encoding cannot assign options to members of a sum, got {sorted(options)}. "
            "Write them into the spec."
        )
    if len(built) == 1:
        return built[0]
    check_samplers(built)
    return Compose(built)


def _check_instance(encoding: Encoding, facts: Mapping[str, Any]) -> None:
    """Raise if an encoding has other sizes than its host."""
    for part in encoding.parts():
        sizes = {k: getattr(part, k) for k in _SIZES if hasattr(part, k)}
        if sizes.get("dim") and sizes.get("head_dim", 0) is None:  # None stands for dim / num_heads
            sizes["head_dim"] = sizes["dim"] // sizes["num_heads"]
        _check_sizes(part.name, sizes, facts)


def _check_sizes(name: str, value: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Raise if an encoding and its host differ in width, number of heads or depth."""
    for fact in _SIZES:
        if value.get(fact) is not None and facts.get(fact) is not None and value[fact] != facts[fact]:
            raise OptionError(
                f"{name} has {fact}={value[fact]} but the model has {fact}={facts[fact]}. "
                f"Omit {fact}: the model supplies it."
            )


def _build(term: dict[str, Any], facts: dict[str, Any]) -> Encoding:
    options = dict(term)
    name = options.pop("name")
    check_term(name, options)
    _check_sizes(name, options, facts)
    cls = encoding_class(name)
    parameters = inspect.signature(cls).parameters
    supplied = {k: v for k, v in facts.items() if k in parameters and v is not None}
    axes = len(facts.get("grid") or ())
    if axes in cls.ndim and "axes" in parameters and parameters["axes"].default is not None:
        supplied["axes"] = axes  # without the option, the encoding is for the grid of the model
    if (
        "head_dim" not in parameters
        and "dim" in supplied
        and issubclass(cls, Biased | Rotary)
        and not cls.reads_tokens
    ):
        # a class without the option finds the width of its heads as dim / num_heads
        supplied["dim"] = (facts.get("head_dim") or 0) * (facts.get("num_heads") or 0) or supplied["dim"]
    sizes = {**supplied, **options}
    if sizes.get("head_dim") and sizes.get("dim") == sizes["head_dim"] * sizes.get("num_heads", 0):
        # the usual width is not part of the configuration
        supplied.pop("head_dim", None)
        options.pop("head_dim", None)
    # required options that neither the host nor the spec supplies
    missing = [
        p.name for p in parameters.values() if p.default is p.empty and p.name not in {**supplied, **options}
    ]
    if missing:
        raise OptionError(
            f"{name} needs {', '.join(missing)}. Pass create_encoding({name!r}, "
            f"{', '.join(f'{m}=...' for m in missing)})."
        )
    return cls(**{**supplied, **options})
