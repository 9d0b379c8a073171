"""`convert`, `restore` and `describe`: the same three words for every host."""

from __future__ import annotations

from typing import Any, TypeVar

from timm.models import VisionTransformer
from torch import nn

from vispe.errors import OptionError, UnsupportedHost
from vispe.hosts.timm_convert import convert_vit, describe_vit, restore_vit
from vispe.hosts.timm_vit import HostedViT
from vispe.registry import Spec, parse_spec

M = TypeVar("M", bound=nn.Module)


def convert(model: M, spec: Spec, *, keep_abs: bool = False, **options: Any) -> M:
    """Exchange the positional encoding of a model, in place; all checks come before the first change.

    Weights keep their names, so stock checkpoints load strictly before or after. The model's own absolute
    table is put aside (see `restore`) unless `keep_abs`. A converted model can be converted again.

    Args:
        model: a timm `VisionTransformer` (DeiT distilled included), of any kind of block.
        spec: see `vispe.registry`; a term ``learn`` in a sum says the same as `keep_abs`.
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
    convert_vit(model, terms, keep_abs or learn)
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
    """Return what is attached where: encodings, parameters, backends."""
    if isinstance(model, HostedViT):
        return describe_vit(model)
    return f"{type(model).__name__} without an encoding of vispe; vispe.convert(model, 'alibi2d') adds one."


def host_terms(spec: Spec) -> tuple[list[dict[str, Any]], bool]:
    """Return the parsed terms of a spec without timm's own 'learn', and whether that was among them."""
    if isinstance(spec, str):
        names = [t.strip() for t in spec.split("+")]
        rest = [t for t in names if t != "learn"]
        if len(rest) < len(names) and rest:
            return parse_spec("+".join(rest)), True
    elif isinstance(spec, list | tuple):
        rest = [t for t in spec if t != "learn" and t != {"name": "learn"}]
        if len(rest) < len(spec) and rest:
            return parse_spec(rest), True
    return parse_spec(spec), False
