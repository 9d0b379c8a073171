"""Putting an encoding into the vision tower of a Hugging Face model, and taking it out again.

The towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL, whose patches lie in the order in which they are merged, one image
after another; those of CLIP, SigLIP and InternVL, of which LLaVA, LLaVA-OneVision and InternVL are made; and towers
that timm made, which are converted as any timm model. Encodings that all blocks share live at `pos_enc.*` of the
tower, those with parameters per layer at `blocks.<i>.attn.pos_enc.*` or its like; all other parameters keep their
names. All that can fail comes before the first change.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from vispe.encodings.base import Additive, Biased, Encoding, Mixing, Rotary
from vispe.encodings.layer import attend
from vispe.encodings.registry import Spec, create_encoding, encoding_class, parse_spec
from vispe.errors import OptionError, UnsupportedCombination, UnsupportedHost
from vispe.grid import Grid
from vispe.hosts.convert import convert, describe, restore
from vispe.hosts.timm.convert import convert_timm
from vispe.hosts.transformers.classes import positioned
from vispe.hosts.transformers.vision.family import (
    FAMILIES,
    attentions,
    check_values,
    family_of,
    put_table,
    reference_of,
    stock_type,
    table_of,
    take_table,
)
from vispe.hosts.transformers.vision.tower import HostedTower, swapped
from vispe.hosts.transplant.context import HostState, backend_in_words
from vispe.hosts.transplant.fitting import attach, check_axes, joined, refuse_patched, take_over
from vispe.hosts.transplant.twins import advice
from vispe.hosts.transplant.words import finished, timm_terms, with_options

# where towers are kept
_INSIDE = ("model", "visual", "vision_tower", "vision_model", "timm_model", "_backbone")


@dataclass
class _Plan:
    shared: Encoding | None
    own: list[Encoding | None]  # one per attention layer
    layered: bool


def vision_tower_of(model: nn.Module) -> nn.Module:
    """Return what is converted in a model of transformers: its vision tower, or the model that timm made.

    Args:
        model: a vision-language model, with or without its head, or a tower.

    Raises:
        UnsupportedHost: there is no vision tower in it, or one of a class that vispe does not know.
    """
    found: Any = model
    while family_of(found) is None:
        parts = (getattr(found, name, None) for name in _INSIDE)
        inner = next((part for part in parts if isinstance(part, nn.Module)), None)
        if inner is None:
            break
        found = inner
    if family_of(found) is None and not any(c.__module__.startswith("timm.") for c in type(found).__mro__):
        known = ", ".join(f.tower for f in FAMILIES)
        where = "" if found is model else f" with a {type(found).__name__} inside"
        raise UnsupportedHost(
            f"A vision tower was looked for in a {type(model).__name__}{where}, and none that vispe knows was found; "
            f"it knows {known}, and those of timm. {advice(found) or advice(model) or ''}".rstrip()
        )
    return found


def convert_vision(
    model: nn.Module,
    spec: Spec,
    *,
    keep_abs: bool | None = None,
    keep_rope: bool | None = None,
    **options: Any,
) -> None:
    """Put an encoding into the vision tower of a model of transformers, in place, or exchange it for another.

    The encoding works inside attention, image by image: each patch is at its row and column, whatever the order and
    the windows in which the tower sees the patches, and each frame of a video has positions of its own.

    Args:
        model: a vision-language model, or its tower.
        spec: see `vispe.convert`.
        keep_abs: whether the tower's own absolute table stays in use beside the encoding. None keeps what there is,
            except in towers of timm, where it means the same as in `vispe.convert`.
        keep_rope: likewise, of its own rotary embedding.
        **options: options of the encoding.

    Raises:
        UnsupportedHost: there is no tower that vispe knows.
        UnsupportedCombination: the encoding has no place in it, or there is nothing to keep.
        UnknownEncoding, OptionError: the spec is not right.
    """
    tower = vision_tower_of(model)
    if family_of(tower) is None:
        convert(tower, spec, keep_abs=bool(keep_abs), keep_rope=bool(keep_rope), **options)
        return
    terms, learn, rope = timm_terms(spec)
    terms, _ = with_options(terms, False, options)
    convert_tower(tower, terms, learn or keep_abs, rope or keep_rope, finished(spec))


def convert_as_named(part: nn.Module, entry: dict[str, Any]) -> int:
    """Convert a tower as `vispe.hosts.transformers.saving.record` has it, and return how many weights its encoding has.

    Args:
        part: the tower, or what holds a tower of timm.
        entry: of its configuration.
    """
    tower = vision_tower_of(part)
    put = convert_timm if family_of(tower) is None else convert_tower
    put(tower, parse_spec(entry["encoding"]), keep_abs=entry["keep_abs"], keep_rope=entry["keep_rope"])
    return sum(p.numel() for name, p in tower.named_parameters() if "pos_enc." in name)


def convert_tower(
    tower: nn.Module,
    spec: list[dict[str, Any]],
    keep_abs: bool | None = None,
    keep_rope: bool | None = None,
    sources: Sequence[Encoding | None] = (),
) -> None:
    """Convert a tower of transformers in place, or exchange the encoding of a converted one.

    Args:
        tower: an instance of one of the classes of `vispe.hosts.transformers.vision.family.FAMILIES`.
        spec: parsed spec of the encoding.
        keep_abs: see `convert_vision`.
        keep_rope: see `convert_vision`.
        sources: finished encodings whose weights are taken over, one or None per term of the spec.
    """
    family = family_of(tower)
    old = tower.vispe if isinstance(tower, HostedTower) else None
    table = old.table if old else None
    has_table = table_of(tower) is not None or table is not None
    for what, asked, there in (
        ("absolute table", keep_abs, has_table),
        ("rotary embedding", keep_rope, family.rope),
    ):
        if asked and not there:
            raise UnsupportedCombination(
                f"There is no {what} to keep: {stock_type(tower).__name__} has none; leave that out."
            )
    keep_rope = family.rope if keep_rope is None else keep_rope
    keep_abs = has_table if keep_abs is None else keep_abs
    if keep_abs and table is not None:
        check_values(tower, table)
    plan = _plan(tower, spec, keep_rope, sources)
    if old:
        _strip(tower)
    if keep_abs:
        put_table(tower, table)
        table = None
    elif table_of(tower) is not None:
        table = take_table(tower)
    tower.vispe = HostState(
        spec=spec,
        stock=type(tower),
        reference=reference_of(tower),
        table=table,
        lost=(),
        keep_abs=keep_abs,
        inside=True,
        layered=plan.layered,
        keep_rope=keep_rope,
    )
    for module, mixin in swapped(tower):
        module.__class__ = positioned(type(module), mixin)
    attach(tower, plan.shared)
    for (layer, _, module), encoding in zip(attentions(tower), plan.own, strict=True):
        module.vispe_layer = layer
        attach(module, encoding)


def restore_vision(model: nn.Module) -> None:
    """Give the tower of a model its own classes, absolute table and rotary embedding back, in place.

    Raises:
        UnsupportedHost: there is no tower that vispe knows, or it is not converted.
    """
    tower = vision_tower_of(model)
    if family_of(tower) is None:
        restore(tower)
        return
    if not isinstance(tower, HostedTower):
        raise UnsupportedHost(
            f"{type(tower).__name__} has no encoding of vispe, so there is nothing to restore."
        )
    table = tower.vispe.table
    check_values(tower, table)
    _strip(tower)
    put_table(tower, table)


def describe_vision(model: nn.Module) -> str:
    """Return what is attached where in the tower of a model, in a few lines."""
    tower = vision_tower_of(model)
    if not isinstance(tower, HostedTower):
        if family_of(tower) is None:
            return describe(tower)
        return (
            f"{type(tower).__name__} without an encoding of vispe; vispe.convert(tower, 'alibi2d') adds one."
        )
    state, family = tower.vispe, family_of(tower)
    table = "in use" if state.keep_abs else "taken out" if state.table is not None else "none"
    lines = [
        f"transformers {state.stock.__name__} with {' + '.join(str(s) for s in state.spec)}",
        f"  grid of each image, trained at {state.reference or 'any'}, {family.prefix} prefix tokens",
        f"  absolute table: {table}",
    ]
    if family.rope:
        lines.append(f"  own rotary embedding: {'in use' if state.keep_rope else 'taken out'}")
    if tower.pos_enc is not None:
        lines.append(f"  pos_enc: {tower.pos_enc.name}, {_count([tower.pos_enc])} parameters")
    layers = [m for _, _, m in attentions(tower)]
    own = [m.pos_enc for m in layers if m.pos_enc is not None]
    if own:
        lines.append(f"  {len(own)} attention layers with their own: {own[0].name}, {_count(own)} parameters")
    backend = backend_in_words(all(m.fused_attn for m in layers), "the attention implementation is eager")
    lines.append(f"  {len(layers)} attention layers swapped; backend {backend}")
    return "\n".join(lines)


def _count(encodings: Sequence[Encoding]) -> int:
    return sum(p.numel() for e in encodings for p in e.parameters())


def _plan(
    tower: nn.Module, spec: list[dict[str, Any]], keep_rope: bool, sources: Sequence[Encoding | None]
) -> _Plan:
    """Check everything and build the encodings, without touching the tower."""
    family, stock = family_of(tower), stock_type(tower)
    layers = list(attentions(tower))
    for path, module, name in (("", tower, family.tower), *((p, m, family.attention) for _, p, m in layers)):
        cls = stock_type(module)
        if (cls.__module__, cls.__name__) != (family.path, name):
            raise UnsupportedHost(
                f"{path or 'The tower'} is a {cls.__name__} of {cls.__module__}; vispe replaces the forward pass of "
                f"transformers' own {name}, so convert a plain tower."
            )
        refuse_patched(module, path or stock.__name__, ("forward",))
    like = next(tower.parameters())
    facts = {
        "dim": layers[0][2].num_heads * layers[0][2].head_dim,
        "num_heads": layers[0][2].num_heads,
        "depth": len(layers),
        "grid": reference_of(tower),
    }

    def build() -> tuple[Encoding, ...]:
        with torch.device(like.device):
            made = create_encoding(spec, **facts).to(dtype=like.dtype).train(tower.training).parts()
        for encoding, source in zip(made, sources, strict=False):
            if source is not None:
                take_over(encoding, source, "tower")
        return made

    for term in spec:
        _check_kind(term, facts["grid"], stock)
    parts = build()
    for e in parts:
        check_axes(e, 2, stock)
        if isinstance(e, Rotary) and keep_rope:
            raise UnsupportedCombination(
                f"rope + {e.name} was asked, but two rotary encodings would turn the same channels; say "
                f"keep_rope=False to replace that of {stock.__name__}."
            )
    _try_out(parts, family.prefix, layers[0][2], like)
    layered = any(e.per_layer for e in parts)
    own: list[Encoding | None] = []
    for layer, _, _ in layers:
        mine = [e for e in build() if e.per_layer and e.active(layer)] if layered else []
        own.append(joined(mine))
    return _Plan(joined([e for e in parts if not e.per_layer]), own, layered)


def _check_kind(term: dict[str, Any], grid: tuple[int, ...] | None, stock: type[nn.Module]) -> None:
    """Raise when an encoding has no place inside attention, or needs a grid that the tower does not have."""
    cls = encoding_class(term["name"])
    if issubclass(cls, Additive | Mixing) or not (issubclass(cls, Biased | Rotary) or cls.name == "none"):
        raise UnsupportedCombination(
            f"{cls.name} works on the tokens outside of attention, where {stock.__name__} has no place for it; choose "
            "one of vispe.list_encodings(kind='bias', ndim=2)."
        )
    wanted = inspect.signature(cls).parameters.get("grid")
    if grid is None and wanted is not None and wanted.default is wanted.empty and "grid" not in term:
        raise OptionError(
            f"{cls.name} makes its table for one grid, and {stock.__name__} was trained at none in particular; say "
            "grid=[h, w], the rows and columns of an image that the table is for."
        )


def _try_out(parts: Sequence[Encoding], prefix: int, attention: Any, like: Tensor) -> None:
    """Raise what the encodings raise when there is something that the tower does not supply, such as poses."""
    pos = Grid((2, 4), prefix=prefix).positions(like.device)
    x = like.new_zeros(1, pos.tokens, attention.num_heads * attention.head_dim)
    q = rearrange(x, "b n (h d) -> b h n d", h=attention.num_heads)
    devices = [like.device] if like.is_cuda else []
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        for e in parts:
            pos = e.prepare(pos)
        attend(q, q, q, parts, pos, 0, x, backend="reference")


def _strip(tower: nn.Module) -> None:
    """Take the encodings and swapped classes away; the absolute table stays as it is."""
    for _, _, module in attentions(tower):
        del module.vispe_layer, module.pos_enc
    del tower.pos_enc, tower.vispe
    for module, _ in swapped(tower):
        module.__class__ = stock_type(module)
