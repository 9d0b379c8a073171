"""Model names for open_clip: `open_clip.create_model(name)` builds a model whose image tower has an encoding.

open_clip builds models from named configurations, and many scripts accept only a name. `register_alias` registers a
configuration for a stock model with an encoding, so `force_image_size`, `force_patch_dropout`, `precision` and
checkpoints work as usual.

After `install`, a configuration may also contain the spec itself: ``"pos_embed_type": "alibi2d"`` in its `vision_cfg`.
"""

from __future__ import annotations

import inspect
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import open_clip
import timm
import torch
from open_clip import pretrained
from open_clip.transformer import VisionTransformer
from timm.models import register_model

from vispe.encodings.registry import Spec
from vispe.errors import OptionError, UnknownName, UnsupportedHost, did_you_mean
from vispe.hosts.common.conversion.convert import convert_model
from vispe.hosts.common.host_families import family_of
from vispe.hosts.common.host_spec import parse_host_spec
from vispe.hosts.contracts.check import check_contracts_of
from vispe.hosts.monkeypatch import Patch
from vispe.hosts.open_clip.convert import TOWER

_OPEN_CLIP_VALUES = ("learnable", "sin_cos_2d")
_OPTION = "pos_embed_type"
_aliases: dict[str, tuple[str, str]] = {}  # alias -> (base, spec as JSON)


def register_alias(base: str, spec: Spec, *, name: str | None = None) -> str:
    """Register a name under which open_clip builds model `base` with an encoding in its image tower.

    Call it in every process that uses the name. The alias has the pretrained tags of `base`; its checkpoints load
    without their absolute table, unless the spec keeps it by the term ``learn``.

    Example:
        >>> register_alias('ViT-B-32', 'alibi2d')
        'vispe-ViT-B-32-alibi2d'

    Args:
        base: name of a model of open_clip, such as ``ViT-B-32``; see `open_clip.list_models`.
        spec: the encoding, JSON-able.
        name: the new name; default ``vispe-<base>-<spec>``.

    Returns:
        the new name.

    Raises:
        UnknownName: `base` is not a model of open_clip.
        OptionError: the name is already in use, or the spec is not JSON-able.
        UnsupportedHost: the image tower cannot be converted.
        UnsupportedCombination, UnknownEncoding: as `vispe.convert`.
    """
    check_contracts_of("open_clip", "timm")
    config = open_clip.get_model_config(base)
    if config is None:
        raise UnknownName(
            f"open_clip has no model {base!r}.{did_you_mean(base, open_clip.list_models())} "
            "open_clip.list_models() lists them."
        )
    text = _json(spec)
    name = name or f"vispe-{base}-{_plain(spec if isinstance(spec, str) else text)}"
    if _aliases.get(name) == (base, text):
        return name
    if name in open_clip.list_models():
        raise OptionError(
            f"register_alias: name must be new, got {name!r}, a model of open_clip. Use another name."
        )
    vision = config["vision_cfg"]
    if "timm_model_name" in vision:
        vision["timm_model_name"] = _timm_alias(vision["timm_model_name"], spec, text)
    else:
        _check(base, vision, spec)
        install()
        vision[_OPTION] = spec
    _add(name, config)
    if base in pretrained._PRETRAINED:  # open_clip has no public function for this
        pretrained._PRETRAINED[name] = pretrained._PRETRAINED[base]
    _aliases[name] = (base, text)
    return name


def install() -> None:
    """Patch open_clip's image tower to accept the spec of an encoding as `pos_embed_type`; idempotent."""
    check_contracts_of("open_clip", "timm")
    _PATCH.install()


def uninstall() -> None:
    """Remove the patch; existing models keep working, but aliases of such towers can no longer be built."""
    _PATCH.uninstall()


def _wrapped(original: Callable[..., None]) -> Callable[..., None]:
    index = list(inspect.signature(original).parameters).index(_OPTION) - 1  # without self

    def __init__(self: VisionTransformer, *args: Any, **kwargs: Any) -> None:
        positional = len(args) > index
        spec = args[index] if positional else kwargs.get(_OPTION, _OPEN_CLIP_VALUES[0])
        if isinstance(spec, str) and spec in _OPEN_CLIP_VALUES:
            original(self, *args, **kwargs)
            return
        host_spec = parse_host_spec(spec)
        # the constructor of a subclass may not be complete when that of open_clip's class returns
        if type(self) is not VisionTransformer:
            raise UnsupportedHost(
                f"{type(self).__name__}: subclasses of open_clip's VisionTransformer do not support encodings in the "
                f"constructor, got {_OPTION}={spec!r}. Build it without and then call vispe.convert(tower, ...)."
            )
        if positional:
            args = (*args[:index], _OPEN_CLIP_VALUES[0], *args[index + 1 :])
        else:
            kwargs[_OPTION] = _OPEN_CLIP_VALUES[0]
        original(self, *args, **kwargs)
        convert_model(self, TOWER, host_spec, built=True)

    return __init__


_PATCH = Patch(VisionTransformer, "__init__", _wrapped)


def _check(base: str, vision: dict[str, Any], spec: Spec) -> None:
    """Raise the errors of `vispe.convert` for open_clip's own tower of this configuration."""
    vision = vars(open_clip.CLIPVisionCfg(**vision))
    if not isinstance(vision["layers"], int):
        raise UnsupportedHost(
            f"The image tower must be a vision transformer, got {base}, whose tower is a ResNet. Use a model with a "
            "ViT tower such as 'ViT-B-32'."
        )
    if vision[_OPTION] not in _OPEN_CLIP_VALUES:
        raise OptionError(
            f"register_alias: base must be a stock model, got {base} with the encoding {vision[_OPTION]!r}. Use the "
            "stock model."
        )
    names = ("image_size", "patch_size", "width", "layers", "patch_dropout", "block_type")
    options = {name: vision[name] for name in (*names, "scaled_cosine_attn")}
    heads = vision["width"] // vision["head_width"]
    # on the meta device, without memory for weights
    with torch.device("meta"):
        convert_model(VisionTransformer(**options, heads=heads, mlp_ratio=1), TOWER, parse_host_spec(spec))


def _timm_alias(base: str, spec: Spec, text: str) -> str:
    """Register a timm architecture, `base` with the encoding, and return its name."""
    name = "vispe_" + _plain(f"{base}_{spec if isinstance(spec, str) else text}", r"\W+")
    if _aliases.get(name) == (base, text):
        return name
    if timm.is_model(name):
        raise OptionError(
            f"register_alias: timm already has a model {name!r}, which is not {base} with {spec}."
        )
    with torch.device("meta"):
        model = timm.create_model(base, num_classes=0)
        convert_model(model, family_of(model), parse_host_spec(spec))

    def build(**arguments: Any) -> torch.nn.Module:
        return timm.create_model(base, **arguments, pos_embed=spec)

    build.__name__ = build.__qualname__ = name
    build.__module__ = __name__
    register_model(build)
    _aliases[name] = (base, text)
    return name


def _add(name: str, config: dict[str, Any]) -> None:
    """Add a configuration to open_clip, which reads configurations from files, once."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.json"
        path.write_text(json.dumps(config), encoding="utf-8")
        open_clip.add_model_config(path)


def _json(spec: Spec) -> str:
    try:
        return json.dumps(spec, sort_keys=True)
    except TypeError:
        raise OptionError(
            f"register_alias: spec must be serialisable as JSON, got {type(spec).__name__}. Pass a name or a dict, "
            "such as 'alibi2d'."
        ) from None


def _plain(text: str, other: str = r"[^\w.+=,()-]+") -> str:
    """Return `text` with all characters replaced that are not allowed in a file name or identifier."""
    return re.sub(other, "_", text).strip("_")
