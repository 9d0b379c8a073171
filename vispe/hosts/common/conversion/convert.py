"""Conversion and restoration of models, common to all libraries.

All checks run before the first change. Encodings shared by all blocks are registered as `pos_enc` of the model, those
with parameters per layer as `pos_enc` of the attention layer; all other parameters keep their names. Differences
between libraries are methods of a `HostFamily`.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from torch import nn

from vispe.encodings.base import Encoding
from vispe.errors import UnsupportedCombination, UnsupportedHost
from vispe.hosts.common.context import HostState
from vispe.hosts.common.conversion.plan import plan_conversion
from vispe.hosts.common.conversion.sampler_checks import ineffective_samplers
from vispe.hosts.common.conversion.training_grid import base_too_small
from vispe.hosts.common.host_family import HostFamily
from vispe.hosts.common.host_spec import HostSpec
from vispe.hosts.common.layer_access import refuse_parametrized


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
    plan = plan_conversion(model, family, spec, stock, keep_abs, keep_rope)
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
    _attach(model, plan.shared)
    if plan.inside:
        layers = list(family.attentions(model))
        for _, module, cls in list(family.swaps(model)):
            module.__class__ = cls
        for (layer, _, module), encoding in zip(layers, plan.of_layers, strict=True):
            module.vispe_layer = layer
            _attach(module, encoding)
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


def _warn(text: str) -> None:
    """Issue a warning for the caller of `vispe.convert`, whose depth differs between libraries."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("vispe."):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


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


def _attach(module: nn.Module, encoding: Encoding | None) -> None:
    """Set `pos_enc` of a module to an encoding, in training or evaluation mode as the module, or None.

    None is not registered as a module: torch would accept every checkpoint entry below a registered None.
    """
    if encoding is None:
        module.__dict__["pos_enc"] = None
    else:
        module.register_module("pos_enc", encoding.train(module.training))
