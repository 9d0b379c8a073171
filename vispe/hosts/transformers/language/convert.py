"""Conversion of Hugging Face's vision-language models to position schemes: convert, restore."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from vispe.errors import UnsupportedCombination, UnsupportedHost
from vispe.hosts.contracts.check import check_contract, check_contracts_of
from vispe.hosts.contracts.transformers_models import language_contracts
from vispe.hosts.transformers.diagnosis import refusal
from vispe.hosts.transformers.language.allocation import allocations, scheme_of_each_layer, sectioned
from vispe.hosts.transformers.language.conversion_checks import (
    check_by_channel,
    check_halves,
    check_text,
    grouping,
    refuse_hooked,
    refuse_tables,
)
from vispe.hosts.transformers.language.conversion_record import TextConversion, kind_key
from vispe.hosts.transformers.language.converted_classes.allocation_buffers import (
    buffer_of,
    register_allocation,
)
from vispe.hosts.transformers.language.converted_classes.generation import (
    PositionedGeneration,
    PositionedGenerationFromOne,
)
from vispe.hosts.transformers.language.converted_classes.layer import PositionedLayer
from vispe.hosts.transformers.language.converted_classes.model import PositionedModel, PositionedText
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
from vispe.hosts.transformers.language.rope_index import PositionedIndex, PositionedIndexGeneration
from vispe.hosts.transformers.language.rotary_detection import ALL_POSITIONS, DetectedRotary, kinds_of
from vispe.hosts.transformers.subclasses import converted_subclass, stock_of
from vispe.hosts.transformers.version import check_version
from vispe.multimodal.concatenated_scheme import ConcatenatedScheme, scheme_of

_logger = logging.getLogger(__name__)


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
    refuse_hooked(model)
    refuse_tables(scheme, type(model).__name__)
    kind = getattr(inner.config, "model_type", "")
    if kind not in FAMILIES:
        raise UnsupportedHost(refusal(model, scheme.name))
    if oldest := FAMILIES[kind].since:
        check_version(oldest, f"vispe.convert: a position scheme in {kind}")
    text = language_model_of(inner)
    check_contracts_of("transformers")
    check_contract("transformers", language_contracts(inner, text))
    rotaries, heads = check_text(text)
    scheme, of_layer = sectioned(scheme, inner, rotaries), scheme_of_each_layer(scheme, text)
    with torch.device("cpu"):  # values are needed, even if the meta device is the default
        allocated, text_unchanged = allocations(scheme, rotaries, heads)
    check_parallel(parallel)
    if self_extend is not None:
        self_extend = grouping(self_extend, parallel)
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
    check_by_channel(scheme, allocated, rotaries, late_rotation)
    if parallel or self_extend:
        for rotary in rotaries.values():
            check_halves(text, rotary, "parallel" if parallel else "self_extend")
    if not text_unchanged:
        warnings.warn(
            f"{scheme} does not encode text as in the training of {type(model).__name__}: its outputs for text change. "
            "Fine-tune the model.",
            UserWarning,
            stacklevel=5,
        )
    _log_cast(text, rotaries)
    family = family_of(inner.config)
    conversion = TextConversion(
        scheme,
        {kind_key(kind, n): rotaries[kind] for kind in rotaries for n in sorted(set(of_layer))},
        {kind: axes.tolist() for kind, axes in allocated.items()},
        late_rotation,
        parallel,
        self_extend,
        family.first,
        text.config.model_type in ALL_POSITIONS,
        family.prefix_lm,
    )
    kinds = [kind_key(kind, number) for kind, number in zip(kinds_of(text), of_layer, strict=True)]
    if stock_of(type(inner)) is not None:
        restore_vlm(model)
    _replace_classes(model, conversion, allocated, kinds)


def _replace_classes(
    model: Any, conversion: TextConversion, allocated: dict[str, Tensor], kinds: list[str]
) -> None:
    """Replace the classes of a stock model, and add what the new ones read.

    Args:
        model: the model with or without its head.
        conversion: settings of its language model.
        allocated: axis of each channel pair, for each kind of layers.
        kinds: kind of each layer.
    """
    inner = model_inside(model)
    text = language_model_of(inner)
    if model is not inner:
        generation = PositionedGenerationFromOne if conversion.first else PositionedGeneration
        has_index = hasattr(model, "get_rope_index")
        model.__class__ = converted_subclass(
            type(model), PositionedIndexGeneration if has_index else generation
        )
    has_index = hasattr(inner, "get_rope_index")
    inner.__class__ = converted_subclass(type(inner), PositionedIndex if has_index else PositionedModel)
    inner.vispe_scheme = conversion.scheme
    numbered(inner)
    text.__class__ = converted_subclass(type(text), PositionedText)
    text.vispe_text = conversion
    if conversion.late_rotation:
        enable_late_rotation(text)
    register_allocation(text, allocated)
    for layer, kind in zip(text.layers, kinds, strict=True):
        layer.__class__ = converted_subclass(type(layer), PositionedLayer)
        layer.vispe_kind = kind


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
    refuse_hooked(model)
    text = language_model_of(inner)
    for module in (model, inner, text, *text.layers):
        module.__class__ = stock_of(type(module)) or type(module)
    disable_late_rotation(text)
    for layer in text.layers:
        del layer.vispe_kind
    for kind in text.vispe_text.rotary:
        delattr(text, buffer_of(kind))
    del inner.vispe_scheme, inner.vispe_number, text.vispe_text
