"""Position schemes in Hugging Face's vision-language models: convert, restore, describe."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vispe.attention.pairwise_rope.self_extend import check_grouping
from vispe.errors import OptionError, UnsupportedCombination, UnsupportedHost
from vispe.hosts.transformers.diagnosis import refusal
from vispe.hosts.transformers.language import rope_in_attention
from vispe.hosts.transformers.language.converted_classes import (
    PositionedGeneration,
    PositionedLayer,
    PositionedModel,
    PositionedText,
    buffer_of,
)
from vispe.hosts.transformers.language.families import (
    FAMILIES,
    family_of,
    inner_of,
    text_of,
)
from vispe.hosts.transformers.language.parallel_sets import Beside, check_beside
from vispe.hosts.transformers.language.rope_index import (
    INDEX,
    PositionedIndex,
    PositionedIndexGeneration,
)
from vispe.hosts.transformers.language.rotary_detection import Rotary, kinds_of, rotaries_of
from vispe.hosts.transformers.language.traced_positions import numbered
from vispe.hosts.transformers.subclasses import positioned, stock_of
from vispe.multimodal import LayerSchemes, Scheme, create_scheme
from vispe.multimodal.allocation import ZERO
from vispe.multimodal.layered import Layered, scheme_of
from vispe.multimodal.properties import keeps_text

_logger = logging.getLogger(__name__)
GENERATION = (
    "_prepare_position_ids_for_generation",
    "_get_candidate_generator",
    "_update_model_kwargs_for_generation",
)


def is_vlm(model: nn.Module) -> bool:
    """Whether a model is one of transformers', with a language model inside."""
    made_there = any(c.__module__.startswith("transformers.") for c in type(model).__mro__)
    return made_there and text_of(inner_of(model)) is not None


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
    scheme = scheme_of(spec, **options)
    inner = inner_of(model)
    _refuse_hooked(model)
    _refuse_tables(scheme, type(model).__name__)
    kind = getattr(inner.config, "model_type", "")
    if kind not in FAMILIES:
        raise UnsupportedHost(refusal(model, scheme.name))
    text = text_of(inner)
    rotaries, heads = _check_text(text)
    scheme, of_layer = _sectioned(scheme, inner, rotaries), _of_layer(scheme, text)
    with torch.device("cpu"):  # under the meta device there would be no numbers to look at
        allocated, text_kept = _allocations(scheme, rotaries, heads)
    kinds = [key_of(kind, number) for kind, number in zip(kinds_of(text), of_layer, strict=True)]
    check_beside(parallel)
    if self_extend is not None:
        self_extend = _grouping(self_extend, parallel)
    for name, value in (("parallel", parallel), ("self_extend", self_extend)):
        if value is not None and isinstance(scheme, Layered):
            raise UnsupportedCombination(
                f"{name}={value!r} says how far tokens are apart in all layers, which have schemes of their own "
                f"({scheme}); leave one of them out."
            )
        if value is not None:
            rope_in_attention.check_apart(text, name)
    by_head = any(axes.ndim == 2 for axes in allocated.values())
    late_rotation = late_rotation or by_head or bool(parallel or self_extend)
    if late_rotation:
        rope_in_attention.check(text)
    if parallel or self_extend:
        for rotary in rotaries.values():
            _check_halves(text, rotary, "parallel" if parallel else "self_extend")
    if not text_kept:
        warnings.warn(
            f"{scheme} does not encode text as {type(model).__name__} was trained to: its text abilities change until "
            "it is fine-tuned.",
            UserWarning,
            stacklevel=5,
        )
    _log_cast(text, rotaries)
    if stock_of(type(inner)) is not None:
        restore_vlm(model)
    if model is not inner:
        answers = hasattr(model, "get_rope_index")
        model.__class__ = positioned(
            type(model), PositionedIndexGeneration if answers else PositionedGeneration
        )
    indexed = hasattr(inner, "get_rope_index")
    inner.__class__ = positioned(type(inner), PositionedIndex if indexed else PositionedModel)
    inner.vispe_scheme = scheme
    numbered(inner)
    text.__class__ = positioned(type(text), PositionedText)
    text.vispe_late, text.vispe_given_scheme = late_rotation, scheme
    text.vispe_rotary = {key_of(kind, n): rotaries[kind] for kind in rotaries for n in sorted(set(of_layer))}
    text.vispe_beside, text.vispe_extend = parallel, self_extend
    if late_rotation:
        rope_in_attention.switch_on(text)
    text.vispe_allocation = {kind: axes.tolist() for kind, axes in allocated.items()}
    for kind, axes in allocated.items():
        device = text.vispe_rotary[kind].rates(text).device
        text.register_buffer(buffer_of(kind), axes.to(device), persistent=False)
    for layer, kind in zip(text.layers, kinds, strict=True):
        layer.__class__ = positioned(type(layer), PositionedLayer)
        layer.vispe_kind = kind


def _log_cast(text: Any, rotaries: dict[str, Rotary]) -> None:
    """Log where the frequencies of a model were cast to half precision before the conversion."""
    for rotary in rotaries.values():
        rates = rotary.rates(text)
        if rates.dtype.itemsize < 4:
            off = 1e4 * torch.finfo(rates.dtype).eps / 2
            # not a warning: the results are those of the stock model, which says nothing
            _logger.warning(
                "%s: frequencies of the rotary embedding were cast to %s before the conversion, so angles at position "
                "10,000 are off by up to %.0f radians, as in the stock model. Load the model with "
                "from_pretrained(dtype=...), which leaves them in float32, or cast it after the conversion.",
                type(text).__name__,
                rates.dtype,
                off,
            )
            return


def _parts(scheme: Scheme) -> list[tuple[int | None, Scheme, int]]:
    """Return the number of each scheme of layers, None of the one for all, the scheme, and which axis is its first."""
    if isinstance(scheme, Layered):
        return [(number, *part) for number, part in enumerate(scheme.parts)]
    return [(None, scheme, 0)]


def key_of(kind: str, number: int | None) -> str:
    """Return what layers of a kind that take a scheme are called; the kind, where one scheme is for all."""
    return kind if number is None else f"{kind}{number}"


def _of_layer(scheme: Scheme, text: Any) -> Sequence[int | None]:
    """Return the number of the scheme of each layer, None where one is for all."""
    if not isinstance(scheme, Layered):
        return [None] * len(text.layers)
    if len(scheme.layers.of_layer) != len(text.layers):
        raise OptionError(
            f"Schemes for {len(scheme.layers.of_layer)} layers were given to a {type(text).__name__} with "
            f"{len(text.layers)}; give one for each."
        )
    return scheme.layers.of_layer


def _sectioned(scheme: Scheme, inner: Any, rotaries: dict[str, Rotary]) -> Scheme:
    """Return `with_host_sections`, of each scheme."""
    if not isinstance(scheme, Layered):
        return with_host_sections(scheme, inner, rotaries)
    own = tuple(with_host_sections(part, inner, rotaries) for part in scheme.layers.schemes)
    return Layered(LayerSchemes(own, scheme.layers.of_layer))


def _allocations(
    scheme: Scheme, rotaries: dict[str, Rotary], heads: dict[str, int]
) -> tuple[dict[str, Tensor], bool]:
    """Return the axis of each pair in each kind of layers, and whether text stays what it was in all of them."""
    allocated: dict[str, Tensor] = {}
    kept = True
    for number, part, first in _parts(scheme):
        for kind, rotary in rotaries.items():
            axes = _allocated(part, rotary, heads[kind])
            allocated[key_of(kind, number)] = torch.where(axes >= 0, axes + first, axes)
            kept &= keeps_text(part, rotary.turning, heads[kind])
    return allocated, kept


def _allocated(scheme: Scheme, rotary: Rotary, heads: int) -> Tensor:
    """Return the axis of each pair; those that the model does not turn have none."""
    axes = scheme.allocation(rotary.turning, heads)
    if not rotary.still:
        return axes
    turning = [n for n in range(rotary.pairs) if n not in rotary.still]
    every = axes.new_full((*axes.shape[:-1], rotary.pairs), ZERO)
    every[..., turning] = axes
    return every


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


def _check_text(text: Any) -> tuple[dict[str, Rotary], dict[str, int]]:
    """Return the rotary embeddings, one for each kind of layers, and the key heads of a language model."""
    rotaries, layers = rotaries_of(text), getattr(text, "layers", None)
    if not layers:
        raise UnsupportedHost(f"The language model {type(text).__name__} has no `layers`.")
    layer = stock_of(type(layers[0])) or type(layers[0])
    if "position_embeddings" not in inspect.signature(layer.forward).parameters:
        raise UnsupportedHost(f"The decoder layer {layer.__name__} takes no `position_embeddings`.")
    configs = dict.fromkeys(rotaries, text.config)
    if "" not in rotaries and hasattr(text.config, "per_layer_config"):
        kinds = kinds_of(text)
        configs = {kind: text.config.per_layer_config[kinds.index(kind)] for kind in rotaries}
    return rotaries, {kind: int(config.num_key_value_heads) for kind, config in configs.items()}


def _check_halves(text: Any, rotary: Rotary, what: str) -> None:
    """Raise unless all channels of a head turn, in the halves that logits of their own are made of."""
    config = text.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if rotary.interleaved or 2 * rotary.pairs != width:
        raise UnsupportedHost(
            f"{what} makes logits of heads whose halves are pairs and turn whole; in {type(text).__name__} "
            f"{2 * rotary.pairs} of {width} channels turn, {rotary.layout}."
        )


def with_host_sections(scheme: Scheme, inner: Any, rotaries: dict[str, Rotary]) -> Scheme:
    """Return the scheme with the sections that the model was trained with, where they mean the same."""
    host = getattr(text_of(inner).rotary_emb, "mrope_section", None)
    pairs = next(iter(rotaries.values())).pairs
    if host is None or scheme.options().get("sections") is not None or sum(host) != pairs:
        return scheme
    own = family_of(inner.config).own(inner.config)
    if scheme.name != own.name or "sections" not in own.options():
        return scheme
    # a configuration may end before the last axis, which then turns nothing
    padded = (*host, *[0] * (3 - len(host)))
    sections = own.options().get("sections") or padded
    # axes in turn end with the pairs, and the host takes what it finds
    over = any(axis + 3 * (sections[axis] - 1) >= pairs for axis in (1, 2))
    return create_scheme(
        scheme, sections=sections, **({"clip": True} if over and "clip" in own.options() else {})
    )


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
    rope_in_attention.switch_off(text)
    for layer in text.layers:
        del layer.vispe_kind
    for kind in text.vispe_rotary:
        delattr(text, buffer_of(kind))
    del (
        inner.vispe_scheme,
        inner.vispe_number,
        text.vispe_allocation,
        text.vispe_late,
        text.vispe_given_scheme,
    )
    del text.vispe_beside, text.vispe_extend, text.vispe_rotary


def describe_vlm(model: nn.Module) -> str:
    """Return what is attached where, in a few lines."""
    inner: Any = inner_of(model)
    if stock_of(type(inner)) is None:
        return f"{type(model).__name__}: its own position scheme"
    text = text_of(inner)
    lines = [
        _allocation(part, first, _layers_of(kind, number, part), text.vispe_allocation[key_of(kind, number)])
        for number, part, first in _parts(inner.vispe_scheme)
        for kind in dict.fromkeys(kinds_of(text))
    ]
    where = "queries and keys inside the attention" if text.vispe_late else "keys before they are cached"
    return (
        f"{type(model).__name__}: {inner.vispe_scheme} in {len(text.layers)} decoder layers\n"
        f"{''.join(lines)}  turns {where}{_shown(text)}"
    )


def _layers_of(kind: str, number: int | None, scheme: Scheme) -> str:
    """Return which layers are meant, in words; none where these are all."""
    words = [*([kind] if kind else []), *([] if number is None else [scheme.name])]
    return f" in layers of {' with '.join(words)}" if words else ""


def _allocation(scheme: Scheme, first: int, where: str, axes: list[Any]) -> str:
    """Return which axis turns what in some layers, as a line; `first` is the first axis of their scheme."""
    by_head = isinstance(axes[0], list)
    names = {-1: "-", 0: "t", 1: "h", 2: "w"} if scheme.axes == 3 else {-1: "-"}
    each = [row[0] for row in axes] if by_head else axes
    own = [a - first if a >= 0 else a for a in each]
    shown = " ".join(names.get(a, str(a)) for a in own)
    still = any(a < 0 for row in (axes if by_head else [axes]) for a in row)
    shown += " (-: not turned)" if still else ""
    unit = "key head" if by_head else "pair of channels, from the highest frequency"
    return f"  axis of each {unit}{where}: {shown}\n"


def _shown(text: Any) -> str:
    """Return what a language model does beside its scheme, in words."""
    if text.vispe_extend is not None:
        return "\n  self_extend: groups of {} from {} positions on".format(*text.vispe_extend)
    return (
        ""
        if text.vispe_beside is None
        else f"\n  images that stand together have no order: {text.vispe_beside}"
    )
