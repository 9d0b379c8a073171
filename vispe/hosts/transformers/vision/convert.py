"""Conversion of the vision towers of Hugging Face models.

The supported towers are those of Qwen2-VL, Qwen2.5-VL and Qwen3-VL, which pack images into one sequence;
those of CLIP, its copies, SigLIP and InternVL, used in LLaVA, LLaVA-OneVision and InternVL; vision models such
as ViT, DINOv2, DINOv3, RADIO and DPT; and towers built by timm, which are converted as any timm model. The steps are in
`vispe.hosts.common.conversion.convert`.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from vispe.encodings.registry import Spec, parse_spec
from vispe.errors import UnsupportedHost
from vispe.hosts.common.conversion.convert import convert_model, converted_models, restore_model
from vispe.hosts.common.conversion.description import describe_model
from vispe.hosts.common.equivalent_models import advice
from vispe.hosts.common.host_families import family_of as host_family_of
from vispe.hosts.common.host_families import family_or_none, made_by
from vispe.hosts.common.host_spec import HostSpec, parse_host_spec
from vispe.hosts.contracts.check import check_contract, check_contracts_of
from vispe.hosts.contracts.transformers_models import vision_contracts
from vispe.hosts.transformers.vision.families import FAMILIES, VIDEO_KINDS, attentions, family_of, rope_spec
from vispe.hosts.transformers.vision.unsupported import reason_of
from vispe.hosts.unwrap import unwrap
from vispe.hosts.windows import families

# attribute names of towers
_ATTRIBUTES = (
    "model",
    "visual",
    "vision_tower",
    "vision_model",
    "vision_encoder",
    "clip",
    "timm_model",
    "_backbone",
    "backbone",
)


def vision_tower_of(model: nn.Module) -> nn.Module:
    """Return the module of a transformers model that is converted: its vision tower, or a timm model.

    Args:
        model: a vision-language model, with or without its head, or a tower.

    Raises:
        UnsupportedHost: there is no vision tower in it, or its class is not supported.
    """
    tower: Any = model
    while family_of(tower) is None and families.family_of(tower) is None:
        # models with heads store the attribute name of the model inside
        names = (*_ATTRIBUTES, getattr(tower, "base_model_prefix", "") or "model")
        parts = (getattr(tower, name, None) for name in names)
        inner = next((part for part in parts if isinstance(part, nn.Module)), None)
        if inner is None:
            break
        tower = inner
    if families.family_of(tower):
        return tower
    if family_of(tower) is None and not made_by(tower, "timm"):
        reason = reason_of(tower) or reason_of(model)
        if reason is not None:
            raise UnsupportedHost(f"vispe.convert: {reason} {advice(tower) or advice(model) or ''}".rstrip())
        supported = ", ".join(dict.fromkeys(f.tower for f in FAMILIES))
        inside = "" if tower is model else f" with a {type(tower).__name__} inside"
        raise UnsupportedHost(
            f"vispe.convert: no supported vision tower in the model, got a {type(model).__name__}{inside}. Supported "
            f"are {supported}, and those of timm. {advice(tower) or advice(model) or ''}".rstrip()
        )
    return tower


def convert_vision(
    model: nn.Module,
    spec: Spec,
    *,
    keep_abs: bool | None = None,
    keep_rope: bool | None = None,
    **options: Any,
) -> None:
    """Convert the vision tower of a transformers model in place, or replace the encoding of a converted one.

    The encoding acts inside attention, separately for each image: each patch has its row and column, independent of the
    order and the windows of the tower, and each frame of a video has separate positions.

    Args:
        model: a vision-language model, or its tower.
        spec: an encoding, or a sum of encodings and of the keywords for the tower's own position information.
        keep_abs: whether the tower's own absolute table stays in use. None means True if the tower has a
            table, and False in towers of timm.
        keep_rope: whether the tower's own rotary embedding stays in use, as `keep_abs`.
        **options: options of the encoding.

    Raises:
        UnsupportedHost: there is no supported tower.
        UnsupportedCombination: the tower does not support the encoding, or has no table or RoPE that could
            stay in use.
        UnknownEncoding, OptionError: the spec is not valid.
    """
    tower = _part(model)
    _check_contracts(tower)
    family = host_family_of(tower)
    if family_of(tower) is None:
        keep_abs, keep_rope = bool(keep_abs), bool(keep_rope)
    convert_model(tower, family, parse_host_spec(spec, options, keep_abs, keep_rope))


def convert_as_named(part: nn.Module, entry: dict[str, Any]) -> int:
    """Convert a tower to an entry of `vispe.hosts.transformers.saving.config_record`; return the number of weights.

    Args:
        part: the tower, or the module around a tower of timm.
        entry: the entry of its configuration.
    """
    tower = _part(part)
    _check_contracts(tower)
    spec = HostSpec(parse_spec(entry["encoding"]), entry["keep_abs"], entry["keep_rope"])
    convert_model(tower, host_family_of(tower), spec)
    return sum(p.numel() for name, p in tower.named_parameters() if "pos_enc." in name)


def restore_vision(model: nn.Module) -> None:
    """Restore the classes, absolute table and rotary embedding of the vision tower of a model, in place.

    Raises:
        UnsupportedHost: there is no supported tower, or the tower is not converted.
    """
    tower = _part(model)
    restore_model(tower, family_or_none(tower))


def describe_vision(model: nn.Module) -> str:
    """Return a summary of the conversion of the vision tower of a model."""
    tower = vision_tower_of(model)
    converted = [part for _, part in converted_models(tower)]
    if converted:
        return describe_model(converted[0], host_family_of(converted[0]))
    family = family_of(tower)
    example = "alibi3d" if family is not None and family.kind in VIDEO_KINDS else "alibi2d"
    text = f"{type(tower).__name__} without an encoding of vispe; vispe.convert(tower, {example!r}) adds one."
    stock_rope = None if family is None else rope_spec(tower)
    return text if stock_rope is None else f"{text} Its own rotary embedding equals {stock_rope!r}."


def _check_contracts(tower: nn.Module) -> None:
    """Raise `UnsupportedHost` if transformers, or the classes of a tower, do not have what vispe relies on."""
    check_contracts_of("transformers")
    if family := family_of(tower):
        _, _, attention = next(attentions(tower))
        check_contract("transformers", vision_contracts(tower, family, type(attention)))


def _part(model: nn.Module) -> nn.Module:
    """Return the vision tower, or the timm model inside it."""
    tower = vision_tower_of(model)
    return tower if family_of(tower) or families.family_of(tower) else unwrap(tower)
