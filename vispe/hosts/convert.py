"""`convert`, `restore` and `describe`: the same three words for every host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from timm.models import VisionTransformer
from torch import nn

from vispe.base import Encoding
from vispe.errors import OptionError, UnsupportedHost
from vispe.hosts.timm_attention import attentions
from vispe.hosts.timm_convert import convert_vit, restore_vit
from vispe.hosts.timm_vit import HostedViT
from vispe.registry import Spec, parse_spec

M = TypeVar("M", bound=nn.Module)


def convert(model: M, spec: Spec, *, keep_abs: bool = False, **options: Any) -> M:
    """Exchange the positional encoding of a model, in place; all checks come before the first change.

    Weights keep their names, so stock checkpoints load strictly before or after. The model's own absolute
    table is put aside (see `restore`) unless `keep_abs`. A converted model can be converted again.

    Args:
        model: a timm `VisionTransformer` (DeiT distilled included), of any kind of block.
        spec: see `vispe.registry`; a term ``learn`` in a sum says the same as `keep_abs`. Weights of an `Encoding`
            are copied, into every layer where each layer has its own.
        keep_abs: keep the model's own absolute table in use beside the encoding.
        **options: options of the encoding.

    Returns:
        the same model.

    Raises:
        UnsupportedHost: the model, or one of its attention layers, is not of a kind that vispe knows.
        UnsupportedCombination: the encoding has no place in it.
        UnknownEncoding, OptionError: the spec is not right.
    """
    if not isinstance(model, VisionTransformer):
        raise UnsupportedHost(
            f"vispe.convert was given a {type(model).__name__}; it knows timm's VisionTransformer and "
            "VisionTransformerDistilled. Give it the vision tower itself if this model contains one."
        )
    terms, learn = host_terms(spec)
    if options:
        if len(terms) != 1:
            raise OptionError(
                f"Options {sorted(options)} beside a sum are ambiguous; write them into the spec."
            )
        terms = parse_spec({**terms[0], **options})
    convert_vit(model, terms, keep_abs or learn, sources=finished(spec))
    return model


def restore(model: M) -> M:
    """Give a converted model its own classes and absolute table back, in place.

    Outputs are those of before, bit for bit, if no weight has changed; weights trained since stay.

    Raises:
        UnsupportedHost: the model is not converted.
        UnsupportedCombination: the model was built with the encoding, so there is no table to bring back.
    """
    if not isinstance(model, VisionTransformer):
        raise UnsupportedHost(
            f"{type(model).__name__} has no encoding of vispe, so there is nothing to restore."
        )
    restore_vit(model)
    return model


def describe(model: nn.Module) -> str:
    """Return what is attached where: encodings, parameters, backends. Models inside others are found."""
    found = [(name, m) for name, m in model.named_modules() if isinstance(m, HostedViT)]
    if found:
        return "\n".join(f"{name}: {_describe(m)}" if name else _describe(m) for name, m in found)
    return f"{type(model).__name__} without an encoding of vispe; vispe.convert(model, 'alibi2d') adds one."


def _describe(model: HostedViT) -> str:
    """Return what is attached where, in a few lines."""
    state = model.vispe
    table = "in use" if state.keep_abs else "taken out" if state.table else "none"
    lines = [
        f"{state.stock.__name__} with {' + '.join(str(s) for s in state.spec)}",
        f"  grid {tuple(model.patch_embed.grid_size)}, trained at {state.reference}, "
        f"{model.num_prefix_tokens} prefix tokens",
        f"  absolute table: {table}",
    ]
    if model.pos_enc is not None:
        lines.append(f"  pos_enc: {model.pos_enc.name}, {_count([model.pos_enc])} parameters")
    layers = [m for _, _, m in attentions(model)] if state.inside else []
    own = [m.pos_enc for m in layers if m.pos_enc is not None]
    if own:
        lines.append(f"  {len(own)} attention layers with their own: {own[0].name}, {_count(own)} parameters")
    if layers:
        fused = all(m.fused_attn for m in layers)
        backend = "auto" if fused else "reference (fused attention is off)"
        lines.append(f"  {len(layers)} attention layers swapped; backend {backend}")
    return "\n".join(lines)


def _count(encodings: Sequence[Encoding]) -> int:
    return sum(p.numel() for e in encodings for p in e.parameters())


def host_terms(spec: Spec) -> tuple[list[dict[str, Any]], bool]:
    """Return the parsed terms of a spec without timm's own 'learn', and whether that was among them."""
    if isinstance(spec, str):
        names = [t.strip() for t in spec.split("+")]
        rest = [t for t in names if t != "learn"]
        if len(rest) < len(names) and rest:
            return parse_spec("+".join(rest)), True
    elif isinstance(spec, list | tuple):
        rest = [t for t in spec if t not in ("learn", {"name": "learn"})]
        if len(rest) < len(spec) and rest:
            return parse_spec(rest), True
    return parse_spec(spec), False


def finished(spec: Spec) -> list[Encoding | None]:
    """Return the finished encodings in a spec, None for each term that is only described."""
    if isinstance(spec, Encoding):
        return list(spec.parts())
    if isinstance(spec, list | tuple):
        return [e for member in spec if member not in ("learn", {"name": "learn"}) for e in finished(member)]
    return [None] * len(host_terms(spec)[0])
