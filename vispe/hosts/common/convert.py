"""Conversion, restoration and description of models, common to all libraries.

All checks run before the first change. Encodings shared by all blocks are registered as `pos_enc` of the model, those
with parameters per layer as `pos_enc` of the attention layer; all other parameters keep their names. Differences
between libraries are methods of a `HostFamily`.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from vispe.encodings.base import Biased, Encoding, Mixing, Rotary
from vispe.encodings.creation import create_encoding
from vispe.encodings.parts.rotary.head_basis import HeadBasis, describe_bases
from vispe.encodings.registry import encoding_class
from vispe.errors import UnsupportedCombination, UnsupportedHost, counted
from vispe.grid import Grid
from vispe.hosts.common.checks import (
    attach,
    base_too_small,
    check_part,
    check_term,
    composed,
    copy_weights,
    refuse_patched,
)
from vispe.hosts.common.context import HostState, backend_text, stock_mask_text
from vispe.hosts.common.host_family import HostFamily
from vispe.hosts.common.host_spec import HostSpec
from vispe.hosts.common.layer_access import refuse_parametrized
from vispe.hosts.common.sampler_checks import aliased_rotations, check_sampled, ineffective_samplers


class _Plan(NamedTuple):
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


def state_of(model: nn.Module) -> HostState | None:
    """Return the state of a converted model; None for other modules."""
    state = getattr(model, "vispe", None)
    return state if isinstance(state, HostState) else None


def converted_models(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return path and module of every converted model in a module, including the module itself."""
    return [(name, module) for name, module in model.named_modules() if state_of(module)]


def convert_model(model: Any, family: HostFamily, spec: HostSpec, built: bool = False) -> None:
    """Convert a model in place, or replace the encoding of a converted one.

    Args:
        model: a model of `family`.
        family: access to its parts.
        spec: the requested encodings.
        built: whether the model's constructor is still running, so that its own table and RoPE have not been
            used yet.

    Raises:
        UnsupportedHost: the class of the model, or of one of its attention layers, is not supported.
        UnsupportedCombination: the model does not support the encoding, or has no table or RoPE that could
            stay in use.
    """
    old = state_of(model)
    stock, table, rope, lost = (
        (old.stock, old.table, old.rope, old.lost) if old else (type(model), None, None, ())
    )
    has_absolute_table, has_rope = family.has_absolute_table(model), family.has_rope(model)
    keep_abs = has_absolute_table or table is not None if spec.keep_abs is None else spec.keep_abs
    keep_rope = has_rope or rope is not None if spec.keep_rope is None else spec.keep_rope
    if keep_abs and not has_absolute_table and table is None:
        _raise_missing(family, stock, "keep", "absolute table", lost)
    if keep_rope and not has_rope and rope is None:
        _raise_missing(family, stock, "keep", "rotary embedding", lost)
    if keep_abs:
        family.check_detached(model, table)
    plan = _planned(model, family, spec, stock, keep_abs, keep_rope)
    # if the constructor has an argument for the table, it built none, so `restore` cannot supply it
    if built:
        missing = {
            "absolute table": not keep_abs and (family.table_keyword is not None or has_absolute_table),
            "rotary embedding": not keep_rope and has_rope,
        }
        lost = tuple(name for name, is_missing in missing.items() if is_missing)
    # no errors are raised from here on
    if old:
        _strip(model, family)
    reference = old.reference if old else plan.reference
    for report in base_too_small(plan.parts, plan.grid, reference):
        if report.far:
            _warn(f"{report}; use temperature={math.ceil(report.needed)} or more.")
    for text in ineffective_samplers(plan.parts):
        _warn(f"{text}.")
    table = _use_or_detach(
        model, keep_abs, has_absolute_table, family.detach_table, family.attach_table, table
    )
    rope = _use_or_detach(model, keep_rope, has_rope, family.detach_rope, family.attach_rope, rope)
    model.vispe = HostState(
        spec=spec.terms,
        stock=stock,
        reference=reference,
        table=None if built else table,
        lost=lost,
        keep_abs=keep_abs,
        inside=plan.inside,
        layered=family.per_layer or any(e.per_layer for e in plan.parts),
        resolved=family.resolved(spec.terms, plan.parts, reference),
        keep_rope=keep_rope,
        rope=None if built else rope,
    )
    # parameters keep their names: only classes change, and encodings are added as modules
    model.__class__ = plan.cls
    attach(model, plan.shared)
    if plan.inside:
        layers = list(family.attentions(model))
        for _, module, cls in list(family.swaps(model)):
            module.__class__ = cls
        for (layer, _, module), encoding in zip(layers, plan.of_layers, strict=True):
            module.vispe_layer = layer
            attach(module, encoding)
            if all(e.name == "none" for e in plan.parts):
                module.vispe_no_encoding = keep_rope
    family.after_convert(model, old)


def restore_model(model: Any, family: HostFamily | None) -> None:
    """Restore the original classes, absolute table and rotary embedding of a converted model, in place.

    Raises:
        UnsupportedHost: the model is not converted.
        UnsupportedCombination: the model was built with the encoding, so its stock position information does
            not exist.
    """
    state = state_of(model)
    if state is None or family is None:
        title = f"{family.title if family else ''}{type(model).__name__}"
        raise UnsupportedHost(
            f"vispe.restore: the model must be a converted one, got {title} without an encoding."
        )
    if state.lost:
        _raise_missing(family, state.stock, "restore", " and ".join(state.lost), state.lost)
    family.check_detached(model, state.table)
    for path, module, _ in family.swaps(model) if state.inside else ():
        refuse_parametrized(path, module)
    _strip(model, family)
    table_in_use = family.has_absolute_table(model)
    _use_or_detach(model, True, table_in_use, family.detach_table, family.attach_table, state.table)
    rope_in_use = family.has_rope(model)
    _use_or_detach(model, True, rope_in_use, family.detach_rope, family.attach_rope, state.rope)
    family.after_restore(model, state)


def describe_model(model: Any, family: HostFamily) -> str:
    """Return a summary of a converted model: spec, grid, own position information, encodings, backend."""
    state: HostState = model.vispe
    table = "in use" if state.keep_abs else "removed" if state.table is not None else "none"
    lines = [
        f"{family.title}{state.stock.__name__} with {' + '.join(str(s) for s in state.spec)}",
        f"  grid {family.grid_text(model)}",
        f"  absolute table: {table}",
    ]
    if family.has_rope(model) or state.rope:
        lines.append(f"  own rotary embedding: {'in use' if state.keep_rope else 'removed'}")
    if model.pos_enc is not None:
        lines.append(f"  pos_enc: {model.pos_enc.name}, {counted(_count([model.pos_enc]), 'parameter')}")
    acting = [e for _, encoding in model._vispe_paths() for e in encoding.parts()]
    inside = family.always_inside or any(isinstance(e, Biased | Rotary) for e in acting)
    layers: list[Any] = [m for _, _, m in family.attentions(model)] if inside else []
    of_layers = [m.pos_enc for m in layers if m.pos_enc is not None]
    if of_layers:
        name, count = of_layers[0].name, _count(of_layers)
        lines.append(
            f"  {counted(len(of_layers), 'attention layer')} with their own: {name}, {counted(count, 'parameter')}"
        )
    parts = [part for e in (model.pos_enc, *of_layers[:1]) if e is not None for part in e.parts()]
    shape = family.facts(model, list(family.attentions(model)))["grid"]
    notes = [
        *base_too_small(parts, shape, state.reference),
        *ineffective_samplers(parts),
        *aliased_rotations(parts, shape),
        *describe_bases([m for e in of_layers for m in e.modules() if isinstance(m, HeadBasis)]),
    ]
    lines += [f"  {note}" for note in notes]
    if layers:
        backend = backend_text(all(m.fused_attn for m in layers), family.unfused)
        shortcut = stock_mask_text(layers, acting, Grid(tuple(shape))) if shape else None
        lines += [f"  {shortcut}"] if shortcut else []
        lines.append(f"  {counted(len(layers), 'attention layer')} swapped; backend {backend}")
    return "\n".join(lines)


def _warn(text: str) -> None:
    """Issue a warning for the caller of `vispe.convert`, whose depth differs between libraries."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("vispe."):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


def _count(encodings: Sequence[Encoding]) -> int:
    return sum(p.numel() for e in encodings for p in e.parameters())


def _planned(
    model: Any, family: HostFamily, spec: HostSpec, stock: type[Any], keep_abs: bool, keep_rope: bool
) -> _Plan:
    """Run all checks and build the encodings, without changing the model."""
    cls = family.converted_class(stock)
    refuse_patched(model, stock.__name__, family.overridden)
    family.check_model(model, stock, spec.terms)
    layers = list(family.attentions(model))
    family.check_widths(spec.terms, layers)
    facts, like = family.facts(model, layers), next(model.parameters())

    def build(facts: dict[str, Any], layer: int) -> tuple[Encoding, ...]:
        with torch.device(like.device):
            terms = [create_encoding(term, **facts) for term in spec.terms]
            parts = composed(terms).to(dtype=like.dtype).train(model.training).parts()
        for encoding, source in zip_longest(parts, spec.sources):
            if source is not None:
                if family.per_layer and source.state_dict().keys() != encoding.state_dict().keys():
                    encoding.restrict(layer)  # the source may itself be restricted to one layer
                copy_weights(encoding, source, family.noun)
            if family.per_layer:
                encoding.restrict(layer)
        return parts

    classes = [encoding_class(term["name"]) for term in spec.terms]
    # encodings cannot be built for an unsupported attention layer, which may have no num_heads
    if layers and facts.get("num_heads") is None and any(issubclass(c, Biased | Rotary) for c in classes):
        family.check_inside(model)
        _check_swaps(model, family)
    # a model without a fixed grid is treated as an image model, with two axes
    for cls_of_term in classes:
        check_term(cls_of_term, len(facts["grid"] or "hw"), stock)
    parts = build(facts, layers[0][0] if layers else 0)
    for encoding in parts:
        check_part(encoding, family, stock, len(facts["grid"] or "hw"), keep_rope)
    check_sampled(parts, stock, keep_abs, keep_rope)
    family.check_parts(model, parts, layers)
    inside = family.always_inside or any(isinstance(e, Biased | Rotary) for e in parts)
    if inside:
        family.check_inside(model)
        _check_swaps(model, family)
    elif any(isinstance(e, Mixing) for e in parts):
        inside = _swappable(model, family)  # so that blocks called outside the model raise an error
    # per-layer encodings are built once for each layer, as each has parameters of its own
    layered = family.per_layer or any(e.per_layer for e in parts)
    of_layers: list[Encoding | None] = []
    for layer, _, module in layers:
        built = build(family.layer_facts(model, module, facts), layer) if layered else ()
        active = [e for e in built if (family.per_layer or e.per_layer) and e.active(layer)]
        of_layers.append(composed(active))
    shared = composed([e for e in parts if not (family.per_layer or e.per_layer)])
    reference = family.reference(model) or facts["grid"]
    return _Plan(cls, parts, shared, of_layers, inside, facts["grid"], reference)


def _swappable(model: Any, family: HostFamily) -> bool:
    """Return whether attention layers can be converted, for encodings that do not require their conversion."""
    try:
        family.check_inside(model)
        _check_swaps(model, family)
    except UnsupportedHost:
        return False
    return True


def _check_swaps(model: Any, family: HostFamily) -> None:
    """Raise `UnsupportedHost` if a module has no converted class, or has patched methods or parametrized weights."""
    for path, module, cls in family.swaps(model):
        if cls is None:
            raise UnsupportedHost(
                f"{path} must be one of {', '.join(c.__name__ for c in family.known)}, got {type(module).__name__}. "
                "Use an additive encoding, or vispe.Attention in your own blocks."
            )
        refuse_patched(module, path, family.patchable)
        refuse_parametrized(path, module)


def _strip(model: Any, family: HostFamily) -> None:
    """Remove the encodings and restore the original classes; absolute table and rope are not changed."""
    state = model.vispe
    family.before_strip(model)
    if state.inside:
        swapped = [module for _, module, _ in family.swaps(model)]
        for _, _, module in family.attentions(model):
            del module.vispe_layer, module.pos_enc
            vars(module).pop("vispe_no_encoding", None)
        for module in swapped:
            module.__class__ = family.stock_type(module)
    del model.pos_enc, model.vispe
    model.__class__ = state.stock


def _use_or_detach(
    model: Any,
    keep: bool,
    in_use: bool,
    detach: Callable[[Any], Any],
    attach: Callable[[Any, Any], None],
    detached: Any,
) -> Any:
    """Keep the model's own table or RoPE in use, or detach it; return what is detached afterwards."""
    if not keep:
        return detach(model) if in_use else detached
    if not in_use and detached is not None:
        attach(model, detached)
    return None


def _raise_missing(
    family: HostFamily, stock: type[Any], verb: str, name: str, lost: Sequence[str]
) -> NoReturn:
    """Raise an error: the stock model's own table or RoPE does not exist, so it cannot be preserved or restored."""
    reason = f"{family.title}{stock.__name__} has none. Do not request it."
    if lost:
        reason = (
            f"the {family.noun} was built without one. Build the stock model with {family.builder} and load its "
            "weights instead."
        )
    raise UnsupportedCombination(f"There is no {name} to {verb}: {reason}")
