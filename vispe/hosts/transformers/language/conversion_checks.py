"""Checks of a conversion to a position scheme: model, scheme and options."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from vispe.encodings.parts.rotary.pairwise.self_extend import check_self_extend
from vispe.errors import OptionError, UnsupportedCombination, UnsupportedHost, counted
from vispe.hosts.transformers.language.converted_classes.generation import GENERATION
from vispe.hosts.transformers.language.families import language_model_of, model_inside
from vispe.hosts.transformers.language.rope_index import INDEX
from vispe.hosts.transformers.language.rotary_detection import DetectedRotary, kinds_of, rotaries_of
from vispe.hosts.transformers.subclasses import stock_of
from vispe.multimodal import Scheme


def refuse_hooked(model: Any) -> None:
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


def refuse_tables(scheme: Scheme, name: str) -> None:
    """Raise `UnsupportedHost` if a scheme needs an additive table, which the model does not have."""
    if scheme.added:
        raise UnsupportedHost(
            f"{scheme} encodes the axes {list(scheme.added)} by a table added to the tokens, which {name} does not "
            "have. Use options with which they are rotated, such as rotate=both."
        )


def check_text(text: Any) -> tuple[dict[str, DetectedRotary], dict[str, int]]:
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


def grouping(self_extend: Any, parallel: Any) -> tuple[int, int]:
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


def check_by_channel(
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
    if any(rotary.interleaved or rotary.unrotated for rotary in rotaries.values()):
        raise UnsupportedHost(
            f"{scheme} has an axis for each channel, which needs heads that are all rotated in the layout 'half', got "
            f"other heads. {advice}"
        )


def check_halves(text: Any, rotary: DetectedRotary, what: str) -> None:
    """Raise `UnsupportedHost` unless all channels of a head are rotated, in the layout of halves."""
    config = text.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if rotary.interleaved or 2 * rotary.pairs != width:
        raise UnsupportedHost(
            f"{what} needs heads whose channels are all rotated in the layout 'half', got {type(text).__name__} with "
            f"{2 * rotary.pairs} of {counted(width, 'channel')} rotated, {rotary.layout}."
        )
