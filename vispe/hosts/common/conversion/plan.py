"""Plan of a conversion: the checked encodings of a model, for all its blocks and for each of its layers."""

from __future__ import annotations

from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch

from vispe.encodings.base import Biased, Encoding, Mixing, Rotary
from vispe.encodings.compose import Compose
from vispe.encodings.creation import create_encoding
from vispe.encodings.registry import encoding_class
from vispe.errors import UnsupportedCombination, UnsupportedHost, counted
from vispe.hosts.common.conversion.checks import check_part, check_swaps, check_term, refuse_patched
from vispe.hosts.common.conversion.sampler_checks import check_sampled
from vispe.hosts.common.host_family import HostFamily
from vispe.hosts.common.host_spec import HostSpec


class ConversionPlan(NamedTuple):
    """A checked conversion.

    Attributes:
        cls: the class of the converted model.
        parts: an encoding for each term.
        shared: the encodings shared by all blocks.
        of_layers: encodings with separate parameters, for each attention layer.
        inside: whether attention layers are converted.
        grid: the grid that the model is built for.
        reference: the grid of pretraining, to which encodings rescale coordinates.
    """

    cls: type[Any]
    parts: tuple[Encoding, ...]
    shared: Encoding | None
    of_layers: list[Encoding | None]
    inside: bool
    grid: tuple[int, ...] | None
    reference: tuple[int, ...] | None


def plan_conversion(
    model: Any, family: HostFamily, spec: HostSpec, stock: type[Any], keep_abs: bool, keep_rope: bool
) -> ConversionPlan:
    """Run all checks and build the encodings, without changing the model."""
    cls = family.converted_class(stock)
    refuse_patched(model, stock.__name__, family.overridden)
    family.check_model(model, stock, spec.terms)
    layers = list(family.attentions(model))
    family.check_widths(spec.terms, layers)
    facts = family.facts(model, layers)
    # a model without a fixed grid is treated as an image model, with two axes
    axes = len(facts["grid"] or "hw")
    classes = [encoding_class(term["name"]) for term in spec.terms]
    # encodings cannot be built for an unsupported attention layer, which may have no num_heads
    if layers and facts.get("num_heads") is None and any(issubclass(c, Biased | Rotary) for c in classes):
        _check_attentions(model, family)
    for cls_of_term in classes:
        check_term(cls_of_term, axes, stock)
    build = partial(_build, model, family, spec)
    parts = build(facts, layers[0][0] if layers else 0)
    for encoding in parts:
        check_part(encoding, family, stock, axes, keep_rope)
    check_sampled(parts, stock, keep_abs, keep_rope)
    family.check_parts(model, parts, layers)
    inside = _converts_attentions(model, family, parts)
    # per-layer encodings are built once for each layer, as each has parameters of its own
    layered = family.per_layer or any(e.per_layer for e in parts)
    of_layers: list[Encoding | None] = []
    for layer, _, module in layers:
        built = build(family.layer_facts(model, module, facts), layer) if layered else ()
        active = [e for e in built if (family.per_layer or e.per_layer) and e.active(layer)]
        of_layers.append(_composed(active))
    shared = _composed([e for e in parts if not (family.per_layer or e.per_layer)])
    reference = family.reference(model) or facts["grid"]
    return ConversionPlan(cls, parts, shared, of_layers, inside, facts["grid"], reference)


def _build(
    model: Any, family: HostFamily, spec: HostSpec, facts: dict[str, Any], layer: int
) -> tuple[Encoding, ...]:
    """Return an encoding for each term, with the device, dtype and mode of the model and the weights of the user."""
    like = next(model.parameters())
    with torch.device(like.device):
        terms = [create_encoding(term, **facts) for term in spec.terms]
        parts = _composed(terms).to(dtype=like.dtype).train(model.training).parts()
    for encoding, source in zip_longest(parts, spec.sources):
        if source is not None:
            if family.per_layer and source.state_dict().keys() != encoding.state_dict().keys():
                encoding.restrict(layer)  # the source may itself be restricted to one layer
            _copy_weights(encoding, source, family.noun)
        if family.per_layer:
            encoding.restrict(layer)
    return parts


def _check_attentions(model: Any, family: HostFamily) -> None:
    """Raise `UnsupportedHost` if attention layers cannot be converted."""
    family.check_inside(model)
    check_swaps(model, family)


def _converts_attentions(model: Any, family: HostFamily, parts: tuple[Encoding, ...]) -> bool:
    """Return whether attention layers are converted.

    Raises:
        UnsupportedHost: an encoding requires it, and they cannot be converted.
    """
    if family.always_inside or any(isinstance(e, Biased | Rotary) for e in parts):
        _check_attentions(model, family)
        return True
    # mixing does not require it, but blocks called outside the model then raise an error
    if any(isinstance(e, Mixing) for e in parts):
        try:
            _check_attentions(model, family)
        except UnsupportedHost:
            return False
        return True
    return False


def _composed(encodings: list[Encoding]) -> Encoding | None:
    """Return the composition of several encodings; a single encoding itself; None for an empty sequence."""
    return Compose(encodings) if len(encodings) > 1 else encodings[0] if encodings else None


def _copy_weights(encoding: Encoding, source: Encoding, host: str) -> None:
    """Copy the weights of an `Encoding` instance that the user passed.

    Args:
        encoding: destination, built for the host.
        source: the instance passed by the user.
        host: noun for the host in messages: 'model' or 'tower'.

    Raises:
        UnsupportedCombination: names or shapes of the weights differ.
    """
    theirs, ours = source.state_dict(), encoding.state_dict()
    if differing := sorted(set(theirs) ^ set(ours)):
        raise UnsupportedCombination(
            f"{source.name}: this {host} needs {counted(len(ours), 'weight')}, got {len(theirs)} ({differing[0]} "
            f"exists in only one of them). Create the encoding for this {host}, or pass its spec to initialise new "
            "weights."
        )
    for name, value in ours.items():
        if theirs[name].shape != value.shape:
            raise UnsupportedCombination(
                f"{source.name}: this {host} needs {name} of shape {tuple(value.shape)}, got "
                f"{tuple(theirs[name].shape)}. Create the encoding for this {host}, or pass its spec to initialise new "
                "weights."
            )
        value.copy_(theirs[name])
