"""What every host does alike: convert a model, bring back what it was, and say what it has.

All that can fail comes before the first change. Encodings that all blocks share live at `pos_enc.*` of the model, those
with parameters of a layer at `pos_enc.*` of its attention; all other parameters keep their names. What differs between
hosts is asked of a `Family`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from vispe.encodings.base import Biased, Encoding, Mixing, Rotary
from vispe.encodings.registry import create_encoding, encoding_class
from vispe.errors import UnsupportedCombination, UnsupportedHost
from vispe.hosts.common.checks import (
    attach,
    check_part,
    check_term,
    joined,
    refuse_patched,
    take_over,
    too_small,
)
from vispe.hosts.common.context import HostState, backend_in_words
from vispe.hosts.common.host_spec import Wanted
from vispe.hosts.common.layer_access import refuse_parametrized
from vispe.hosts.common.sampler_checks import aliased, check_moved, without_effect

Layers = Sequence[tuple[int, str, nn.Module]]  # block, path and module of every attention layer


class Family:
    """Where models of one kind keep what a conversion touches; each host derives its own.

    Attributes:
        title: what stands before the name of a class in words of this host.
        noun: what such a model is called in errors.
        builder: what builds the stock model.
        unfused: why attention layers are not fused, in words.
        known: attention layers and blocks that can be swapped.
        overridden: methods that the converted counterpart of a model replaces.
        patchable: methods that the counterparts of its parts replace.
        always_inside: whether attention layers are swapped whatever an encoding does.
        apart: whether every attention layer has encodings of its own, as heads and grids differ between them.
        mixes: whether the forward pass calls encodings between blocks.
        holds_back: whether prefix tokens can be kept out of the first blocks.
        word: the word of the host's own constructor for its absolute table, with which a model is built that keeps it.
    """

    title = ""
    noun = "model"
    builder = ""
    unfused = "fused attention is off"
    known: Iterable[type[nn.Module]] = ()
    overridden: tuple[str, ...] = ("forward",)
    patchable: tuple[str, ...] = ("forward",)
    always_inside = False
    apart = False
    mixes = True
    holds_back = False
    word: str | None = None

    def hosted(self, stock: type[Any]) -> type[Any]:
        """Return the converted counterpart of a class; raise `UnsupportedHost` where there is none."""
        raise NotImplementedError

    def stock_type(self, module: nn.Module) -> type[Any]:
        """Return the class that a part has in its host, whether it is swapped or not."""
        raise NotImplementedError

    def attentions(self, model: Any) -> Iterator[tuple[int, str, nn.Module]]:
        """Yield (block, path, module) of every attention layer."""
        raise NotImplementedError

    def swaps(self, model: Any) -> Iterator[tuple[str, nn.Module, type[Any] | None]]:
        """Yield (path, module, class when converted) of every part that an encoding inside attention swaps."""
        raise NotImplementedError

    def reference(self, model: Any) -> tuple[int, ...] | None:
        """Return the grid of pretraining where the model names one, else None: then it is the grid of the model."""
        del model
        return None

    def facts(self, model: Any, layers: Layers) -> dict[str, Any]:
        """Return what encodings need: dim, num_heads, head_dim, depth and the grid of the training resolution."""
        raise NotImplementedError

    def facts_at(self, model: Any, attention: nn.Module, facts: dict[str, Any]) -> dict[str, Any]:
        """Return what encodings of one attention layer need to know, from `facts` of the model."""
        del model, attention
        return facts

    def where(self, model: Any) -> str:
        """Return grid and prefix tokens of a converted model in words."""
        raise NotImplementedError

    def has_table(self, model: Any) -> bool:
        """Whether the model has an absolute table now."""
        raise NotImplementedError

    def take_table(self, model: Any) -> Any:
        """Take the absolute table out and return what `put_table` needs."""
        raise NotImplementedError

    def put_table(self, model: Any, kept: Any) -> None:
        """Bring the absolute table back, for the grid, device and dtype that the model has now."""
        raise NotImplementedError

    def has_rope(self, model: Any) -> bool:
        """Whether the model has a rotary embedding of its own now."""
        del model
        return False

    def take_rope(self, model: Any) -> Any:
        """Take the rotary embedding out and return what `put_rope` needs."""

    def put_rope(self, model: Any, kept: Any) -> None:
        """Bring the rotary embedding back."""

    def check_widths(self, terms: Sequence[dict[str, Any]], layers: Layers) -> None:
        """Raise where the heads of the layers differ in width, and a term is built for one width."""

    def check_model(self, model: Any, stock: type[Any], terms: list[dict[str, Any]]) -> None:
        """Raise where the model, or a term in it, cannot be converted, before anything is built."""

    def check_parts(self, model: Any, parts: Sequence[Encoding], layers: Layers) -> None:
        """Raise where an encoding has no place in the model."""

    def check_inside(self, model: Any) -> None:
        """Raise where an encoding does not reach attention."""

    def check_aside(self, model: Any, table: Any) -> None:
        """Raise where a table that was taken out cannot be brought back."""

    def resolved(
        self, terms: list[dict[str, Any]], parts: Sequence[Encoding], grid: Any
    ) -> list[dict[str, Any]]:
        """Return the spec from which such a model is built again, where that is another than `terms`."""
        del terms, parts, grid
        return []

    def finish(self, model: Any, old: HostState | None) -> None:
        """Do what else there is to do once a model is converted, maybe from what it had before."""

    def leave(self, model: Any) -> None:
        """Undo that before the encodings go."""

    def restored(self, model: Any, state: HostState) -> None:
        """Do what else there is to do once a model has its own classes, table and rotary embedding again."""


class _Plan(NamedTuple):
    """What is put into a model.

    Attributes:
        cls: the class of the converted model.
        parts: an encoding for each term.
        shared: those of them that all blocks share.
        own: for each attention layer those with parameters of their own.
        inside: whether attention layers are swapped.
        grid: the grid that the model is built for.
        reference: the grid of pretraining, to which encodings rescale coordinates.
    """

    cls: type[Any]
    parts: tuple[Encoding, ...]
    shared: Encoding | None
    own: list[Encoding | None]
    inside: bool
    grid: tuple[int, ...] | None
    reference: tuple[int, ...] | None


def state_of(model: nn.Module) -> HostState | None:
    """Return what a converted model remembers; None for one that is not converted."""
    state = getattr(model, "vispe", None)
    return state if isinstance(state, HostState) else None


def converted_parts(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return path and module of every converted model in a module, itself included."""
    return [(name, module) for name, module in model.named_modules() if state_of(module)]


def put_in(model: Any, family: Family, wanted: Wanted, built: bool = False) -> None:
    """Convert a model in place, or exchange the encoding of a converted one.

    Args:
        model: one of `family`.
        family: where things are in it.
        wanted: what the spec asks.
        built: whether the model is being built with the encoding, so that its own table and rope never counted.

    Raises:
        UnsupportedHost: the model, or one of its attention layers, is not of a kind that vispe knows.
        UnsupportedCombination: the encoding has no place in it, or there is nothing to keep.
    """
    old = state_of(model)
    stock, table, rope, lost = (
        (old.stock, old.table, old.rope, old.lost) if old else (type(model), None, None, ())
    )
    has_table, has_rope = family.has_table(model), family.has_rope(model)
    keep_abs = has_table or table is not None if wanted.keep_abs is None else wanted.keep_abs
    keep_rope = has_rope or rope is not None if wanted.keep_rope is None else wanted.keep_rope
    if keep_abs and not has_table and table is None:
        _refuse(family, stock, "keep", "absolute table", lost)
    if keep_rope and not has_rope and rope is None:
        _refuse(family, stock, "keep", "rotary embedding", lost)
    if keep_abs:
        family.check_aside(model, table)
    plan = _planned(model, family, wanted, stock, keep_abs, keep_rope)
    # a constructor that was called with `family.word` has made no table, so the model lacks it all the same
    if built:
        gone = {
            "absolute table": not keep_abs and (family.word is not None or has_table),
            "rotary embedding": not keep_rope and has_rope,
        }
        lost = tuple(name for name, is_gone in gone.items() if is_gone)
    # nothing fails from here on
    if old:
        _strip(model, family)
    reference = old.reference if old else plan.reference
    for one in too_small(plan.parts, plan.grid, reference):
        if one.far:
            text = f"{one}; say temperature={math.ceil(one.needed)} or more."
            warnings.warn(text, stacklevel=4)  # the caller of `vispe.convert`
    for text in without_effect(plan.parts):
        warnings.warn(f"{text}.", stacklevel=4)
    table = _own(model, keep_abs, has_table, family.take_table, family.put_table, table)
    rope = _own(model, keep_rope, has_rope, family.take_rope, family.put_rope, rope)
    model.vispe = HostState(
        spec=wanted.terms,
        stock=stock,
        reference=reference,
        table=None if built else table,
        lost=lost,
        keep_abs=keep_abs,
        inside=plan.inside,
        layered=family.apart or any(e.per_layer for e in plan.parts),
        resolved=family.resolved(wanted.terms, plan.parts, reference),
        keep_rope=keep_rope,
        rope=None if built else rope,
    )
    # parameters stay where they are: only classes change, and encodings come as modules of their own
    model.__class__ = plan.cls
    attach(model, plan.shared)
    if plan.inside:
        layers = list(family.attentions(model))
        for _, module, made in list(family.swaps(model)):
            module.__class__ = made
        for (layer, _, module), encoding in zip(layers, plan.own, strict=True):
            module.vispe_layer = layer
            attach(module, encoding)
            if all(e.name == "none" for e in plan.parts):
                module.vispe_bare = keep_rope
    family.finish(model, old)


def take_out(model: Any, family: Family | None) -> None:
    """Give a converted model its own classes, absolute table and rotary embedding back, in place.

    Raises:
        UnsupportedHost: the model is not converted.
        UnsupportedCombination: it was built with the encoding, and without something that the stock model has.
    """
    state = state_of(model)
    if state is None or family is None:
        title = f"{family.title if family else ''}{type(model).__name__}"
        raise UnsupportedHost(f"{title} has no encoding of vispe, so there is nothing to restore.")
    if state.lost:
        _refuse(family, state.stock, "restore", " and ".join(state.lost), state.lost)
    family.check_aside(model, state.table)
    for path, module, _ in family.swaps(model) if state.inside else ():
        refuse_parametrized(path, module)
    _strip(model, family)
    _own(model, True, family.has_table(model), family.take_table, family.put_table, state.table)
    _own(model, True, family.has_rope(model), family.take_rope, family.put_rope, state.rope)
    family.restored(model, state)


def in_words(model: Any, family: Family) -> str:
    """Return what is attached where in a converted model, in a few lines."""
    state: HostState = model.vispe
    table = "in use" if state.keep_abs else "taken out" if state.table is not None else "none"
    lines = [
        f"{family.title}{state.stock.__name__} with {' + '.join(str(s) for s in state.spec)}",
        f"  grid {family.where(model)}",
        f"  absolute table: {table}",
    ]
    if family.has_rope(model) or state.rope:
        lines.append(f"  own rotary embedding: {'in use' if state.keep_rope else 'taken out'}")
    if model.pos_enc is not None:
        lines.append(f"  pos_enc: {model.pos_enc.name}, {_count([model.pos_enc])} parameters")
    acting = [e for _, encoding in model._vispe_paths() for e in encoding.parts()]
    inside = family.always_inside or any(isinstance(e, Biased | Rotary) for e in acting)
    layers: list[Any] = [m for _, _, m in family.attentions(model)] if inside else []
    own = [m.pos_enc for m in layers if m.pos_enc is not None]
    if own:
        lines.append(f"  {len(own)} attention layers with their own: {own[0].name}, {_count(own)} parameters")
    parts = [part for e in (model.pos_enc, *own[:1]) if e is not None for part in e.parts()]
    shape = family.facts(model, list(family.attentions(model)))["grid"]
    notes = [*too_small(parts, shape, state.reference), *without_effect(parts), *aliased(parts, shape)]
    lines += [f"  {one}" for one in notes]
    if layers:
        backend = backend_in_words(all(m.fused_attn for m in layers), family.unfused)
        lines.append(f"  {len(layers)} attention layers swapped; backend {backend}")
    return "\n".join(lines)


def _count(encodings: Sequence[Encoding]) -> int:
    return sum(p.numel() for e in encodings for p in e.parameters())


def _planned(
    model: Any, family: Family, wanted: Wanted, stock: type[Any], keep_abs: bool, keep_rope: bool
) -> _Plan:
    """Check everything and build the encodings, without touching the model."""
    cls = family.hosted(stock)
    refuse_patched(model, stock.__name__, family.overridden)
    family.check_model(model, stock, wanted.terms)
    layers = list(family.attentions(model))
    family.check_widths(wanted.terms, layers)
    facts, like = family.facts(model, layers), next(model.parameters())

    def build(facts: dict[str, Any], layer: int) -> tuple[Encoding, ...]:
        with torch.device(like.device):
            terms = [create_encoding(term, **facts) for term in wanted.terms]
            parts = joined(terms).to(dtype=like.dtype).train(model.training).parts()
        for encoding, source in zip_longest(parts, wanted.sources):
            if source is not None:
                if family.apart and source.state_dict().keys() != encoding.state_dict().keys():
                    encoding.restrict(layer)  # the source may come from such a layer itself
                take_over(encoding, source, family.noun)
            if family.apart:
                encoding.restrict(layer)
        return parts

    classes = [encoding_class(term["name"]) for term in wanted.terms]
    if layers and facts.get("num_heads") is None and any(issubclass(c, Biased | Rotary) for c in classes):
        family.check_inside(model)
        _check_swaps(model, family)  # of an unknown layer not even the heads are known
    for cls_of_term in classes:
        check_term(cls_of_term, len(facts["grid"] or "hw"), stock)
    parts = build(facts, layers[0][0] if layers else 0)
    for encoding in parts:
        check_part(encoding, family, stock, len(facts["grid"] or "hw"), keep_rope)
    check_moved(parts, stock, keep_abs, keep_rope)
    family.check_parts(model, parts, layers)
    inside = family.always_inside or any(isinstance(e, Biased | Rotary) for e in parts)
    if inside:
        family.check_inside(model)
        _check_swaps(model, family)
    elif any(isinstance(e, Mixing) for e in parts):
        inside = _swappable(model, family)  # then blocks that are called without the model raise an error
    # each layer has parameters of its own, so encodings that are per layer are built once for each
    layered = family.apart or any(e.per_layer for e in parts)
    own: list[Encoding | None] = []
    for layer, _, module in layers:
        built = build(family.facts_at(model, module, facts), layer) if layered else ()
        own.append(joined([e for e in built if (family.apart or e.per_layer) and e.active(layer)]))
    shared = joined([e for e in parts if not (family.apart or e.per_layer)])
    reference = family.reference(model) or facts["grid"]
    return _Plan(cls, parts, shared, own, inside, facts["grid"], reference)


def _swappable(model: Any, family: Family) -> bool:
    """Return whether attention layers can be swapped, for encodings that do not need it."""
    try:
        family.check_inside(model)
        _check_swaps(model, family)
    except UnsupportedHost:
        return False
    return True


def _check_swaps(model: Any, family: Family) -> None:
    """Raise when a part that has to be swapped is of a class without a counterpart, or carries methods of its own."""
    for path, module, made in family.swaps(model):
        if made is None:
            raise UnsupportedHost(
                f"{path} is a {type(module).__name__}; vispe knows {', '.join(c.__name__ for c in family.known)}. Use "
                "an additive encoding, or vispe.Attention in your own blocks."
            )
        refuse_patched(module, path, family.patchable)
        refuse_parametrized(path, module)


def _strip(model: Any, family: Family) -> None:
    """Take the encodings and swapped classes away; absolute table and rope stay as they are."""
    state = model.vispe
    family.leave(model)
    if state.inside:
        swapped = [module for _, module, _ in family.swaps(model)]
        for _, _, module in family.attentions(model):
            del module.vispe_layer, module.pos_enc
            vars(module).pop("vispe_bare", None)
        for module in swapped:
            module.__class__ = family.stock_type(module)
    del model.pos_enc, model.vispe
    model.__class__ = state.stock


def _own(
    model: Any,
    keep: bool,
    there: bool,
    take: Callable[[Any], Any],
    put: Callable[[Any, Any], None],
    aside: Any,
) -> Any:
    """Leave what the model had of its own in use, or take it out; return what is put aside then."""
    if not keep:
        return take(model) if there else aside
    if not there and aside is not None:
        put(model, aside)
    return None


def _refuse(family: Family, stock: type[Any], verb: str, name: str, lost: Sequence[str]) -> NoReturn:
    """Raise because something that the stock model may have is not there to be kept or restored."""
    reason = f"{family.title}{stock.__name__} has none; leave that out."
    if lost:
        reason = (
            f"the {family.noun} was built without one. Build the stock model with {family.builder} and load its "
            "weights instead."
        )
    raise UnsupportedCombination(f"There is no {name} to {verb}: {reason}")
