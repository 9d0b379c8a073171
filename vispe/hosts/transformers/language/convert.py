"""Conversion of Hugging Face's vision-language models to position schemes: convert, restore."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vispe.encodings.parts.rotary.pairwise.self_extend import check_self_extend
from vispe.errors import OptionError, UnsupportedCombination, UnsupportedHost, counted
from vispe.hosts.contracts.check import check_contract, check_contracts_of
from vispe.hosts.contracts.transformers import language_contracts
from vispe.hosts.transformers.diagnosis import refusal
from vispe.hosts.transformers.language.conversion_record import TextConversion, kind_key, schemes_of
from vispe.hosts.transformers.language.converted_classes.generation import (
    PositionedGeneration,
    PositionedGenerationFromOne,
)
from vispe.hosts.transformers.language.converted_classes.layer import PositionedLayer
from vispe.hosts.transformers.language.converted_classes.model import (
    PositionedModel,
    PositionedText,
    buffer_of,
)
from vispe.hosts.transformers.language.families import (
    FAMILIES,
    family_of,
    language_model_of,
    model_inside,
)
from vispe.hosts.transformers.language.parallel_sets import Parallel, check_parallel
from vispe.hosts.transformers.language.positions.traced_positions import numbered
from vispe.hosts.transformers.language.rope_in_attention import (
    check_late_rotation,
    check_pairwise,
    disable_late_rotation,
    enable_late_rotation,
)
from vispe.hosts.transformers.language.rope_index import (
    INDEX,
    PositionedIndex,
    PositionedIndexGeneration,
)
from vispe.hosts.transformers.language.rotary_detection import (
    ALL_POSITIONS,
    DetectedRotary,
    kinds_of,
    rotaries_of,
)
from vispe.hosts.transformers.subclasses import converted_subclass, stock_of
from vispe.hosts.transformers.version import check_version
from vispe.multimodal import PerLayerSchemes, Scheme, create_scheme
from vispe.multimodal.allocation import ZERO
from vispe.multimodal.concatenated_scheme import ConcatenatedScheme, scheme_of
from vispe.multimodal.properties import is_text_exact

_logger = logging.getLogger(__name__)
# methods that the class of a model with a head overrides
GENERATION = tuple(name for name, value in vars(PositionedGeneration).items() if inspect.isfunction(value))


def is_vision_language_model(model: nn.Module) -> bool:
    """Return whether a model is a model of transformers with a language model inside."""
    of_transformers = any(c.__module__.startswith("transformers.") for c in type(model).__mro__)
    return of_transformers and language_model_of(model_inside(model)) is not None


def convert_vlm(
    model: nn.Module,
    spec: Any,
    *,
    late_rotation: bool = False,
    parallel: Parallel | None = None,
    self_extend: tuple[int, int] | None = None,
    **options: Any,
) -> None:
    """Replace the position scheme of a vision-language model in place; all checks run before the first change.

    Args:
        model: the model with or without its head.
        spec: name of a position scheme, with options, or a `Scheme` instance.
        late_rotation: rotate queries and keys inside the attention, so that unrotated keys are cached; always enabled
            for schemes with an axis per head.
        parallel: rule for adjacent images, that is, images separated by markers only, which then have no
            order. With ``'graph_kv'``, images start at the same position and attend to themselves only; with
            ``'pine'``, each query orders them by importance. A call may define other sets by `parallel_ids`.
        self_extend: group and window; tokens beyond the window are counted in groups (SelfExtend).
        **options: options of the scheme.

    Raises:
        UnsupportedHost: the model family, or its rotary embedding, is not supported.
        UnsupportedCombination: two options are mutually exclusive.
        UnknownName, OptionError: the spec is not valid.
    """
    scheme = scheme_of(spec, **options)
    inner = model_inside(model)
    _refuse_hooked(model)
    _refuse_tables(scheme, type(model).__name__)
    kind = getattr(inner.config, "model_type", "")
    if kind not in FAMILIES:
        raise UnsupportedHost(refusal(model, scheme.name))
    if oldest := FAMILIES[kind].since:
        check_version(oldest, f"vispe.convert: a position scheme in {kind}")
    text = language_model_of(inner)
    check_contracts_of("transformers")
    check_contract("transformers", language_contracts(inner, text))
    rotaries, heads = _check_text(text)
    scheme, of_layer = _sectioned(scheme, inner, rotaries), _of_layer(scheme, text)
    with torch.device("cpu"):  # values are needed, even if the meta device is the default
        allocated, text_unchanged = _allocations(scheme, rotaries, heads)
    kinds = [kind_key(kind, number) for kind, number in zip(kinds_of(text), of_layer, strict=True)]
    check_parallel(parallel)
    if self_extend is not None:
        self_extend = _grouping(self_extend, parallel)
    for name, value in (("parallel", parallel), ("self_extend", self_extend)):
        if value is not None and isinstance(scheme, ConcatenatedScheme):
            raise UnsupportedCombination(
                f"{name}={value!r} determines distances in all layers and excludes schemes per layer, got {scheme}. "
                "Omit one of them."
            )
        if value is not None:
            check_pairwise(text, name)
    by_head = any(axes.ndim == 2 for axes in allocated.values())
    late_rotation = late_rotation or by_head or bool(parallel or self_extend)
    if late_rotation:
        check_late_rotation(text)
    _check_by_channel(scheme, allocated, rotaries, late_rotation)
    if parallel or self_extend:
        for rotary in rotaries.values():
            _check_halves(text, rotary, "parallel" if parallel else "self_extend")
    if not text_unchanged:
        warnings.warn(
            f"{scheme} does not encode text as in the training of {type(model).__name__}: its outputs for text change. "
            "Fine-tune the model.",
            UserWarning,
            stacklevel=5,
        )
    _log_cast(text, rotaries)
    if stock_of(type(inner)) is not None:
        restore_vlm(model)
    family = family_of(inner.config)
    first = family.first
    if model is not inner:
        has_index = hasattr(model, "get_rope_index")
        generation = PositionedGenerationFromOne if first else PositionedGeneration
        model.__class__ = converted_subclass(
            type(model), PositionedIndexGeneration if has_index else generation
        )
    indexed = hasattr(inner, "get_rope_index")
    inner.__class__ = converted_subclass(type(inner), PositionedIndex if indexed else PositionedModel)
    inner.vispe_scheme = scheme
    numbered(inner)
    text.__class__ = converted_subclass(type(text), PositionedText)
    text.vispe_text = TextConversion(
        scheme,
        {kind_key(kind, n): rotaries[kind] for kind in rotaries for n in sorted(set(of_layer))},
        {kind: axes.tolist() for kind, axes in allocated.items()},
        late_rotation,
        parallel,
        self_extend,
        first,
        text.config.model_type in ALL_POSITIONS,
        family.prefix_lm,
    )
    if late_rotation:
        enable_late_rotation(text)
    for kind, axes in allocated.items():
        device = text.vispe_text.rotary[kind].rates(text).device
        text.register_buffer(buffer_of(kind), axes.to(device), persistent=False)
    for layer, kind in zip(text.layers, kinds, strict=True):
        layer.__class__ = converted_subclass(type(layer), PositionedLayer)
        layer.vispe_kind = kind


def _check_by_channel(
    scheme: Scheme, allocated: dict[str, Tensor], rotaries: dict[str, DetectedRotary], late_rotation: bool
) -> None:
    """Raise an error if a scheme has an axis for each channel, and the model needs one for each pair."""
    pairs = max(rotary.pairs for rotary in rotaries.values())
    if not any(axes.ndim == 1 and len(axes) > pairs for axes in allocated.values()):
        return
    advice = "Use an axis for each pair: layout='paired'."
    if late_rotation:
        raise UnsupportedCombination(
            f"late_rotation needs an axis for each pair of channels, got {scheme} with one for each channel. {advice}"
        )
    if any(rotary.interleaved or rotary.still for rotary in rotaries.values()):
        raise UnsupportedHost(
            f"{scheme} has an axis for each channel, which needs heads that are all rotated in the layout 'half', got "
            f"other heads. {advice}"
        )


def _log_cast(text: Any, rotaries: dict[str, DetectedRotary]) -> None:
    """Log a warning if the frequencies of a model were cast to half precision before the conversion."""
    for rotary in rotaries.values():
        rates = rotary.rates(text)
        if rates.dtype.itemsize < 4:
            error = 1e4 * torch.finfo(rates.dtype).eps / 2
            # logged instead of warned, as results equal those of the stock model, which issues no warning
            _logger.warning(
                "%s: frequencies of the rotary embedding were cast to %s before the conversion, so angles at position "
                "10,000 are off by up to %.0f radians, as in the stock model. Load the model with "
                "from_pretrained(dtype=...), which leaves them in float32, or cast it after the conversion.",
                type(text).__name__,
                rates.dtype,
                error,
            )
            return


def _of_layer(scheme: Scheme, text: Any) -> Sequence[int | None]:
    """Return the index of the scheme of each layer; None if one scheme is used in all layers."""
    if not isinstance(scheme, ConcatenatedScheme):
        return [None] * len(text.layers)
    if len(scheme.layers.of_layer) != len(text.layers):
        raise OptionError(
            f"{type(text).__name__} needs one scheme for each of {counted(len(text.layers), 'layer')}, got schemes for "
            f"{len(scheme.layers.of_layer)}."
        )
    return scheme.layers.of_layer


def _sectioned(scheme: Scheme, inner: Any, rotaries: dict[str, DetectedRotary]) -> Scheme:
    """Return the scheme after `with_host_sections`, applied to the scheme of each layer."""
    if not isinstance(scheme, ConcatenatedScheme):
        return with_host_sections(scheme, inner, rotaries)
    schemes = tuple(with_host_sections(part, inner, rotaries) for part in scheme.layers.schemes)
    return ConcatenatedScheme(PerLayerSchemes(schemes, scheme.layers.of_layer))


def _allocations(
    scheme: Scheme, rotaries: dict[str, DetectedRotary], heads: dict[str, int]
) -> tuple[dict[str, Tensor], bool]:
    """Return the axis of each channel pair in each kind of layers, and whether text is encoded as before."""
    allocated: dict[str, Tensor] = {}
    unchanged = True
    for number, part, first in schemes_of(scheme):
        for kind, rotary in rotaries.items():
            axes = _allocated(part, rotary, heads[kind])
            allocated[kind_key(kind, number)] = torch.where(axes >= 0, axes + first, axes)
            unchanged &= is_text_exact(part, rotary.num_rotated, heads[kind])
    return allocated, unchanged


def _allocated(scheme: Scheme, rotary: DetectedRotary, heads: int) -> Tensor:
    """Return the axis of each pair; `ZERO` for pairs that the model does not rotate."""
    axes = scheme.allocation(rotary.num_rotated, heads)
    if not rotary.still:
        return axes
    rotated = [n for n in range(rotary.pairs) if n not in rotary.still]
    padded = axes.new_full((*axes.shape[:-1], rotary.pairs), ZERO)
    padded[..., rotated] = axes
    return padded


def _grouping(self_extend: Any, parallel: Any) -> tuple[int, int]:
    """Return group and window, checked."""
    if parallel is not None:
        raise UnsupportedCombination(
            f"parallel and self_extend exclude each other, got parallel={parallel!r} and self_extend={self_extend!r}. "
            "Omit one of them."
        )
    if not isinstance(self_extend, tuple | list) or len(self_extend) != 2:
        raise OptionError(
            f"self_extend must be a group and a window, such as (4, 1024), got {self_extend!r}."
        )
    check_self_extend(*self_extend)
    return int(self_extend[0]), int(self_extend[1])


def _check_text(text: Any) -> tuple[dict[str, DetectedRotary], dict[str, int]]:
    """Return the rotary embedding and the number of key heads for each kind of layers of a language model."""
    rotaries, layers = rotaries_of(text), getattr(text, "layers", None)
    if not layers:
        raise UnsupportedHost(
            f"Position schemes need a language model with `layers`, got {type(text).__name__} without."
        )
    layer = stock_of(type(layers[0])) or type(layers[0])
    if "position_embeddings" not in inspect.signature(layer.forward).parameters:
        raise UnsupportedHost(
            f"Position schemes need decoder layers with the argument `position_embeddings`, got {layer.__name__}."
        )
    configs = dict.fromkeys(rotaries, text.config)
    if "" not in rotaries and hasattr(text.config, "per_layer_config"):
        kinds = kinds_of(text)
        configs = {kind: text.config.per_layer_config[kinds.index(kind)] for kind in rotaries}
    return rotaries, {kind: int(config.num_key_value_heads) for kind, config in configs.items()}


def _check_halves(text: Any, rotary: DetectedRotary, what: str) -> None:
    """Raise `UnsupportedHost` unless all channels of a head are rotated, in the layout of halves."""
    config = text.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if rotary.interleaved or 2 * rotary.pairs != width:
        raise UnsupportedHost(
            f"{what} needs heads whose channels are all rotated in the layout 'half', got {type(text).__name__} with "
            f"{2 * rotary.pairs} of {counted(width, 'channel')} rotated, {rotary.layout}."
        )


def with_host_sections(scheme: Scheme, inner: Any, rotaries: dict[str, DetectedRotary]) -> Scheme:
    """Return the scheme with the sections of the host, if these have the same meaning."""
    host = getattr(language_model_of(inner).rotary_emb, "mrope_section", None)
    pairs = next(iter(rotaries.values())).pairs
    if host is None or scheme.options().get("sections") is not None or sum(host) != pairs:
        return scheme
    stock = family_of(inner.config).own(inner.config)
    if scheme.name != stock.name or "sections" not in stock.options():
        return scheme
    # configurations may omit sections of the last axes, which are then 0
    padded = (*host, *[0] * (3 - len(host)))
    sections = stock.options().get("sections") or padded
    # interleaved axes may exceed the number of pairs; the host clips them
    over = any(axis + 3 * (sections[axis] - 1) >= pairs for axis in (1, 2))
    return create_scheme(
        scheme, sections=sections, **({"clip": True} if over and "clip" in stock.options() else {})
    )


def _refuse_tables(scheme: Scheme, name: str) -> None:
    """Raise `UnsupportedHost` if a scheme needs an additive table, which the model does not have."""
    if scheme.added:
        raise UnsupportedHost(
            f"{scheme} encodes the axes {list(scheme.added)} by a table added to the tokens, which {name} does not "
            "have. Use options with which they are rotated, such as rotate=both."
        )


def _refuse_hooked(model: Any) -> None:
    """Raise `UnsupportedHost` if methods are patched on an instance, which would hide those of its new class.

    After removal, hooks of accelerate leave the class's method as an attribute of the instance, which is
    deleted here.
    """
    inner = model_inside(model)
    text = language_model_of(inner)
    parts = {text: ("forward",), inner: ("forward", *INDEX)}
    parts |= {} if model is inner else {model: GENERATION}
    parts |= dict.fromkeys(getattr(text, "layers", ()), ("forward",))
    patched = [
        (name, module, method)
        for name, module in model.named_modules()
        for method in parts.get(module, ())
        if method in vars(module)
    ]
    for name, module, method in patched:
        if getattr(vars(module)[method], "__func__", None) is not getattr(type(module), method, None):
            raise UnsupportedHost(
                f"{name or type(model).__name__}: {method} is patched on the instance, as by device_map with several "
                "devices, which would hide the method of the class. Load the model without device_map, convert it, and "
                "call accelerate.dispatch_model afterwards; accelerate.hooks.remove_hook_from_submodules removes hooks."
            )
    for _, module, method in patched:
        delattr(module, method)


def restore_vlm(model: nn.Module) -> None:
    """Restore the original classes of a converted model, in place.

    Raises:
        UnsupportedHost: the model is not converted.
    """
    inner = model_inside(model)
    if stock_of(type(inner)) is None:
        raise UnsupportedHost(
            f"vispe.restore: the model must be converted, got {type(model).__name__} with its own position scheme."
        )
    _refuse_hooked(model)
    text = language_model_of(inner)
    for module in (model, inner, text, *text.layers):
        module.__class__ = stock_of(type(module)) or type(module)
    disable_late_rotation(text)
    for layer in text.layers:
        del layer.vispe_kind
    for kind in text.vispe_text.rotary:
        delattr(text, buffer_of(kind))
    del inner.vispe_scheme, inner.vispe_number, text.vispe_text
