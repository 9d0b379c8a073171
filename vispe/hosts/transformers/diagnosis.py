"""Error messages for models of transformers that do not support position schemes.

`refusal` inspects the model and returns the reason that applies, and what to do instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from vispe.encodings.spec import SCHEME_NAMES, parse_text
from vispe.errors import UnsupportedHost
from vispe.hosts.transformers.language.families import FAMILIES, language_model_of, model_inside
from vispe.hosts.transformers.language.rotary_detection import rotaries_of
from vispe.hosts.transformers.subclasses import stock_of
from vispe.multimodal import PerLayerSchemes, Scheme
from vispe.multimodal.concatenated_scheme import ConcatenatedScheme

# attribute names of the language model, in order of precedence
TEXT_TOWERS = ("language_model", "text_model", "text_decoder", "decoder")
# reasons that cannot be detected, by model type
REASONS = {
    "apertus1p5": "vispe has no rule yet for its images, which are codes of an image tokenizer, with row ends",
    "dots3_note": "vispe has no rule yet for its images; its layers with indexers rotate queries and keys in float32",
    "fuyu": "its calls do not contain the sizes of images, so the rows of image tokens are unknown",
    "minicpmv4_7": "it assigns positions on a canvas to the tokens around image slices as well, which no scheme does",
    "phi4_multimodal": "vispe has no rule yet for its images, which are crops and a thumbnail with row ends",
    "pi0": "its action expert attends to the keys of its vision-language model, and counts positions itself",
}


def names_of(spec: Any) -> list[str]:
    """Return the names in a spec of encodings or a position scheme; an `Encoding` or `Scheme` instance has none."""
    if isinstance(spec, str):
        return [name for name, _ in parse_text(spec)]
    if isinstance(spec, Mapping):
        return [str(spec.get("name", ""))]
    return [name for part in spec for name in names_of(part)] if isinstance(spec, list | tuple) else []


def names_scheme(spec: Any) -> bool:
    """Return whether a spec is or names a position scheme."""
    if isinstance(spec, Scheme | PerLayerSchemes):
        return True
    return any(name in (*SCHEME_NAMES, ConcatenatedScheme.name) for name in names_of(spec))


def check_no_scheme(model: nn.Module, spec: Any) -> None:
    """Raise `UnsupportedHost` for a position scheme if the model is a vision model from another library."""
    if names_scheme(spec):
        raise UnsupportedHost(
            f"vispe.convert: {type(model).__name__} does not support the position scheme {spec}: it is a vision model "
            "without a language model. Use an encoding, such as vispe.convert(model, 'alibi2d'); see "
            "vispe.list_encodings()."
        )


def refusal(model: nn.Module, scheme: Any) -> str:
    """Return the message for a model of transformers that does not support position schemes.

    Args:
        model: a model of transformers, not of a family that supports schemes.
        scheme: the scheme or its spec, for the message.
    """
    inner = model_inside(model)
    kind = getattr(getattr(inner, "config", None), "model_type", "")
    cls = (stock_of(type(model)) or type(model)).__name__
    reason, advice = _reason(model, inner)
    return f"vispe.convert: {cls} ({kind}) does not support the position scheme {scheme}: {reason}. {advice}"


def supported_part(model: nn.Module) -> str | None:
    """Return the path of the first submodule that supports position schemes, such as ``'thinker'``, or None."""
    for path, part in model.named_modules():
        config = getattr(part, "config", None)
        if (
            path
            and getattr(config, "model_type", None) in FAMILIES
            and language_model_of(model_inside(part)) is not None
        ):
            return path
    return None


def _reason(model: Any, inner: Any) -> tuple[str, str]:
    """Return the reason, without a full stop, and the advice."""
    families = f"Use a model of another family. Supported families: {', '.join(FAMILIES)}."
    if reason := REASONS.get(getattr(getattr(inner, "config", None), "model_type", "")):
        return reason, families
    if path := supported_part(model):
        return (
            f"the vision-language model is its submodule `{path}`",
            f"Call vispe.convert(model.{path}, ...).",
        )
    tower, path = _text_tower(model, inner)
    inputs = _modalities(model)
    if inputs and not inputs & {"image", "video"}:
        if "audio" in inputs:
            return (
                "its inputs are audio and no images, and position schemes assign positions to images",
                families,
            )
        return (
            "its inputs contain no images, and position schemes assign positions to images",
            "If it is part of a vision-language model, call vispe.convert with the complete model, head included. "
            f"Supported families: {', '.join(FAMILIES)}.",
        )
    if _is_encoder_decoder(model, inner, tower):
        return "it has an encoder and a decoder, whose positions are not those of one sequence", families
    if inputs and "text" not in inputs:
        return (
            "it is a vision model without a language model",
            "Use an encoding, such as vispe.convert(model, 'alibi2d'); see vispe.list_encodings().",
        )
    if _has_cross_attention(tower):
        return "its images are not tokens of the sequence, but the input of cross-attention layers", families
    try:
        rotaries_of(tower)
    except UnsupportedHost as error:
        return f"{str(error)[0].lower()}{str(error)[1:]}".rstrip("."), families
    if getattr(getattr(inner, "config", None), "model_type", None) in FAMILIES:
        return (
            "its language model must be the attribute `language_model` or `text_model`, got "
            f"`{path or 'no language model'}`",
            "Use the class of transformers for this model type, or extend `language_model_of` in vispe.",
        )
    named = f" (its language model is `{path}`)" if path else ""
    return (
        f"the image placeholders and image sizes of this model type are unknown to vispe{named}",
        f"Add the model type to vispe (CONTRIBUTING.md has the steps). {families.replace('Use', 'Or use', 1)}",
    )


def _modalities(model: Any) -> set[str]:
    """Return the input modalities of a model: image, video, audio, text; empty if its class does not name them."""
    named = getattr(model, "input_modalities", None) or ()
    return {named} if isinstance(named, str) else set(named)


def _text_tower(model: Any, inner: Any) -> tuple[Any, str]:
    """Return the language model of a vision-language model, and the path of its attribute; '' for the model itself.

    If it has no rotary embedding, the first submodule with a rotary embedding and layers is returned.
    """
    below = getattr(model, "model", None)
    starts = [(below, "model.")] if isinstance(below, nn.Module) else []
    starts.append((model, ""))
    towers = (
        (getattr(part, name), path + name)
        for part, path in starts
        for name in TEXT_TOWERS
        if isinstance(getattr(part, name, None), nn.Module)
    )
    tower, path = next(towers, (inner if inner is not model else starts[0][0], ""))
    if hasattr(tower, "rotary_emb"):
        return tower, path
    parts = (part for part in tower.modules() if hasattr(part, "rotary_emb") and hasattr(part, "layers"))
    return next(parts, tower), path


def _is_encoder_decoder(model: Any, inner: Any, tower: Any) -> bool:
    configs = (getattr(part, "config", None) for part in (model, inner, tower))
    return any(getattr(config, "is_encoder_decoder", False) for config in configs)


def _has_cross_attention(tower: Any) -> bool:
    """Return whether images are inputs of cross-attention layers instead of tokens in the sequence."""
    if getattr(getattr(tower, "config", None), "cross_attention_layers", None):
        return True
    names = (name.rpartition(".")[2].lower() for name, _ in tower.named_modules())
    return any("cross" in name and "att" in name for name in names)
