"""Position schemes in Hugging Face's vision-language models: convert, restore, describe."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
from torch import nn

from vispe.attention.turned.grouped import check_grouping
from vispe.errors import OptionError, UnsupportedCombination, UnsupportedHost
from vispe.hosts.transformers.classes import positioned, stock_of
from vispe.hosts.transformers.language import late as hf_late
from vispe.hosts.transformers.language.beside import Beside, check_beside
from vispe.hosts.transformers.language.classes import (
    PositionedGeneration,
    PositionedLayer,
    PositionedModel,
    PositionedText,
)
from vispe.hosts.transformers.language.families import (
    FAMILIES,
    Rotary,
    family_of,
    missing,
    rotaries_of,
    text_of,
)
from vispe.hosts.transformers.language.rope_index import INDEX, PositionedIndex
from vispe.hosts.transformers.language.traced import numbered
from vispe.multimodal import Scheme, create_scheme
from vispe.multimodal.properties import keeps_text

GENERATION = (
    "_prepare_position_ids_for_generation",
    "_get_candidate_generator",
    "_update_model_kwargs_for_generation",
)


def is_vlm(model: nn.Module) -> bool:
    """Whether a model is one of transformers', with a language model inside."""
    made_there = any(c.__module__.startswith("transformers.") for c in type(model).__mro__)
    return made_there and text_of(inner_of(model)) is not None


def inner_of(model: Any) -> Any:
    """Return the model without its head."""
    return model.model if text_of(getattr(model, "model", None)) is not None else model


def convert_vlm(
    model: nn.Module,
    spec: Any,
    *,
    late_rotation: bool = False,
    parallel: Beside | None = None,
    self_extend: tuple[int, int] | None = None,
    **options: Any,
) -> None:
    """Exchange the position scheme of a vision-language model, in place; all checks come before the first change.

    Args:
        model: the model with its head, or without.
        spec: name of a position scheme, with options, or a finished `Scheme`.
        late_rotation: turn queries and keys inside the attention, so that the cache holds keys without positions;
            always so for schemes with an axis for each head.
        parallel: images that stand together, with nothing but markers between them, have no order: ``'graph_kv'`` lets
            them start at one position and see themselves only, ``'pine'`` lets each query put what matters most to it
            nearest. Tokens of a call say otherwise by `parallel_ids`.
        self_extend: group and window: tokens so far apart are counted in groups (SelfExtend).
        **options: options of the scheme.

    Raises:
        UnsupportedHost: the model is not of a family that vispe knows, or its rotary embedding is of another kind.
        UnknownName, OptionError: the spec is not right.
    """
    scheme = create_scheme(spec, **options)
    inner = inner_of(model)
    _refuse_hooked(model)
    _refuse_tables(scheme, type(model).__name__)
    kind = getattr(inner.config, "model_type", "")
    if kind not in FAMILIES:
        raise UnsupportedHost(
            f"The position scheme {scheme.name} was to go into a {type(model).__name__} ({kind}), but "
            f"{missing(inner)}. Families that take one: {', '.join(FAMILIES)}."
        )
    text = text_of(inner)
    rotaries, heads = _check_text(text)
    first = next(iter(rotaries.values()))
    scheme = with_host_sections(scheme, inner, first.pairs)
    with torch.device("cpu"):  # under the meta device there would be no numbers to look at
        axes = {kind: scheme.allocation(rotary.pairs, heads) for kind, rotary in rotaries.items()}
        text_kept = all(keeps_text(scheme, rotary.pairs, heads) for rotary in rotaries.values())
    check_beside(parallel)
    if self_extend is not None:
        self_extend = _grouping(self_extend, parallel)
    for name, value in (("parallel", parallel), ("self_extend", self_extend)):
        if value is not None:
            hf_late.check_apart(text, name)
    late_rotation = late_rotation or axes[first.kind].ndim == 2 or bool(parallel or self_extend)
    if late_rotation:
        hf_late.check(text)
        _check_one_kind(text, rotaries)
    if parallel or self_extend:
        _check_halves(text, first, "parallel" if parallel else "self_extend")
    if not text_kept:
        warnings.warn(
            f"{scheme} does not encode text as {type(model).__name__} was trained to: its text abilities change until "
            "it is fine-tuned.",
            UserWarning,
            stacklevel=5,
        )
    if stock_of(type(inner)) is not None:
        restore_vlm(model)
    if model is not inner:
        model.__class__ = positioned(type(model), PositionedGeneration)
    indexed = hasattr(inner, "get_rope_index")
    inner.__class__ = positioned(type(inner), PositionedIndex if indexed else PositionedModel)
    inner.vispe_scheme = scheme
    numbered(inner)
    device = first.rates(text.rotary_emb).device
    text.__class__ = positioned(type(text), PositionedText)
    text.vispe_late, text.vispe_axes, text.vispe_rotary = late_rotation, scheme.axes, rotaries
    text.vispe_beside, text.vispe_extend = parallel, self_extend
    if late_rotation:
        hf_late.switch_on(text)
    text.vispe_allocation = {kind: axis.tolist() for kind, axis in axes.items()}
    for kind, axis in axes.items():
        text.register_buffer(rotaries[kind].buffer, axis.to(device), persistent=False)
    kinds = text.config.layer_types if first.kind else [""] * len(text.layers)
    for layer, kind in zip(
        text.layers, kinds, strict=False
    ):  # layers may be fewer than the configuration says
        layer.__class__, layer.vispe_kind = positioned(type(layer), PositionedLayer), kind


def _grouping(given: Any, parallel: Any) -> tuple[int, int]:
    """Return group and window, checked."""
    if parallel is not None:
        raise UnsupportedCombination(
            f"parallel={parallel!r} and self_extend={given!r} each say how far tokens are apart; leave one of them out."
        )
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise OptionError(f"self_extend is a group and a window, such as (4, 1024), got {given!r}.")
    check_grouping(*given)
    return int(given[0]), int(given[1])


def _check_one_kind(text: Any, rotaries: dict[str, Rotary]) -> None:
    """Raise where layers differ in their frequencies, so that no one table turns what a cache holds."""
    if len(rotaries) > 1:
        raise UnsupportedHost(
            f"Rotation inside the attention turns all layers by the same frequencies; those of {type(text).__name__} "
            f"differ between {' and '.join(rotaries)}."
        )


def _check_text(text: Any) -> tuple[dict[str, Rotary], int]:
    """Return the rotary embedding by kind of layer, and the key heads of a language model."""
    rotaries, layers = rotaries_of(text), getattr(text, "layers", None)
    if not layers:
        raise UnsupportedHost(f"The language model {type(text).__name__} has no `layers`.")
    layer = stock_of(type(layers[0])) or type(layers[0])
    if "position_embeddings" not in inspect.signature(layer.forward).parameters:
        raise UnsupportedHost(f"The decoder layer {layer.__name__} takes no `position_embeddings`.")
    return rotaries, int(text.config.num_key_value_heads)


def _check_halves(text: Any, rotary: Rotary, what: str) -> None:
    """Raise unless all channels of a head turn, in the halves that logits of their own are made of."""
    config = text.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if rotary.interleaved or 2 * rotary.pairs != width:
        raise UnsupportedHost(
            f"{what} makes logits of heads whose halves are pairs and turn whole; in {type(text).__name__} "
            f"{2 * rotary.pairs} of {width} channels turn, {rotary.layout}."
        )


def with_host_sections(scheme: Scheme, inner: Any, pairs: int) -> Scheme:
    """Return the scheme with the sections that the model was trained with, where they mean the same."""
    host = getattr(text_of(inner).rotary_emb, "mrope_section", None)
    if host is None or scheme.options().get("sections") is not None or sum(host) != pairs:
        return scheme
    own = family_of(inner.config).own(inner.config)
    if scheme.name != own.name:
        return scheme
    return create_scheme(scheme, sections=own.options().get("sections") or tuple(host))


def _refuse_tables(scheme: Scheme, name: str) -> None:
    """Raise where a scheme counts on a table that the model does not have."""
    if scheme.added:
        raise UnsupportedHost(
            f"{scheme} leaves the axes {list(scheme.added)} to a table added to the tokens, which {name} does not "
            "have; choose options under which they turn channels, such as rotate=both."
        )


def _refuse_hooked(model: Any) -> None:
    """Raise when a part whose class is exchanged carries methods of its own, which would hide those of the class.

    Hooks that were taken off leave the method of the class behind on the instance; that is taken away.
    """
    inner = inner_of(model)
    text = text_of(inner)
    parts = {text: ("forward",), inner: ("forward", *INDEX)}
    parts |= {} if model is inner else {model: GENERATION}
    parts |= dict.fromkeys(getattr(text, "layers", ()), ("forward",))
    carried = [
        (name, module, method)
        for name, module in model.named_modules()
        for method in parts.get(module, ())
        if method in vars(module)
    ]
    for name, module, method in carried:
        if getattr(vars(module)[method], "__func__", None) is not getattr(type(module), method):
            raise UnsupportedHost(
                f"{name or type(model).__name__} has {method} replaced on the instance, as device_map does with "
                "several devices, which hides what the class does; load the model without device_map, convert it, and "
                "call accelerate.dispatch_model then. accelerate.hooks.remove_hook_from_submodules takes hooks off."
            )
    for _, module, method in carried:
        delattr(module, method)


def restore_vlm(model: nn.Module) -> None:
    """Give a converted model its own classes back, in place.

    Raises:
        UnsupportedHost: the model is not converted.
    """
    inner = inner_of(model)
    if stock_of(type(inner)) is None:
        raise UnsupportedHost(
            f"This {type(model).__name__} has its own position scheme; there is nothing to restore."
        )
    _refuse_hooked(model)
    text = text_of(inner)
    for module in (model, inner, text, *text.layers):
        module.__class__ = stock_of(type(module)) or type(module)
    hf_late.switch_off(text)
    for rotary in text.vispe_rotary.values():
        delattr(text, rotary.buffer)
    for layer in text.layers:
        del layer.vispe_kind
    del (
        inner.vispe_scheme,
        inner.vispe_number,
        text.vispe_allocation,
        text.vispe_late,
        text.vispe_axes,
    )
    del text.vispe_beside, text.vispe_extend, text.vispe_rotary


def describe_vlm(model: nn.Module) -> str:
    """Return what is attached where, in a few lines."""
    inner: Any = inner_of(model)
    if stock_of(type(inner)) is None:
        return f"{type(model).__name__}: its own position scheme"
    text = text_of(inner)
    axes = torch.tensor(next(iter(text.vispe_allocation.values())))
    names = {-1: "-", 0: "t", 1: "h", 2: "w"} if inner.vispe_scheme.axes == 3 else {-1: "-"}
    shown = " ".join(names.get(a, str(a)) for a in (axes[:, 0] if axes.ndim == 2 else axes).tolist())
    shown += " (-: not turned)" if bool((axes < 0).any()) else ""
    unit = "key head" if axes.ndim == 2 else "pair of channels, from the highest frequency"
    where = "queries and keys inside the attention" if text.vispe_late else "keys before they are cached"
    return (
        f"{type(model).__name__}: {inner.vispe_scheme} in {len(text.layers)} decoder layers\n"
        f"  axis of each {unit}: {shown}\n  turns {where}{_shown(text)}"
    )


def _shown(text: Any) -> str:
    """Return what a language model does beside its scheme, in words."""
    if text.vispe_extend is not None:
        return "\n  self_extend: groups of {} from {} positions on".format(*text.vispe_extend)
    return (
        ""
        if text.vispe_beside is None
        else f"\n  images that stand together have no order: {text.vispe_beside}"
    )
