"""Names for open_clip: `open_clip.create_model(name)` builds a model whose image tower has an encoding.

open_clip builds models from configurations by name, and a name is all that many scripts pass on.
`register_alias` makes such a name out of that of a stock model and the spec of an encoding; what it makes is a plain
configuration, so `force_image_size`, `force_patch_dropout`, `precision` and checkpoints work as before.

A configuration of one's own may say the same: ``"pos_embed_type": "alibi2d"`` in its `vision_cfg`, after `install`.
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
from open_clip import pretrained as tags
from open_clip.transformer import VisionTransformer
from timm.models import register_model

from vispe.encodings.registry import Spec
from vispe.errors import OptionError, UnknownName, UnsupportedHost, did_you_mean
from vispe.hosts.common.host_spec import read
from vispe.hosts.monkeypatch import Door
from vispe.hosts.open_clip.convert import convert_tower
from vispe.hosts.timm.convert import convert_timm

_OPEN_CLIP_WORDS = ("learnable", "sin_cos_2d")
_WORD = "pos_embed_type"
_POSITION = list(inspect.signature(VisionTransformer.__init__).parameters).index(_WORD) - 1  # without self
_known: dict[str, tuple[str, str]] = {}  # alias -> (base, spec as JSON)


def register_alias(base: str, spec: Spec, *, name: str | None = None) -> str:
    """Make a name under which open_clip builds model `base` with an encoding in its image tower.

    Call it in every process that uses the name. Pretrained tags of `base` are those of the alias too; its
    checkpoints load, without their absolute table unless the spec keeps it by a term ``learn``.

    Example:
        >>> register_alias('ViT-B-32', 'alibi2d')
        'vispe-ViT-B-32-alibi2d'

    Args:
        base: name of a model of open_clip, ``ViT-B-32`` for one; `open_clip.list_models` lists them.
        spec: the encoding, JSON-able.
        name: the new name; ``vispe-<base>-<spec>`` by default.

    Returns:
        the new name.

    Raises:
        UnknownName: open_clip has no model `base`.
        OptionError: the name stands for something else already, or the spec is not JSON-able.
        UnsupportedHost: the image tower is not one that can be converted.
        UnsupportedCombination, UnknownEncoding: as `vispe.convert`.
    """
    config = open_clip.get_model_config(base)
    if config is None:
        raise UnknownName(
            f"open_clip has no model {base!r}.{did_you_mean(base, open_clip.list_models())} "
            "open_clip.list_models() lists them."
        )
    text = _json(spec)
    name = name or f"vispe-{base}-{_plain(spec if isinstance(spec, str) else text)}"
    if _known.get(name) == (base, text):
        return name
    if name in open_clip.list_models():
        raise OptionError(f"open_clip has a model {name!r} already; give another name.")
    vision = config["vision_cfg"]
    if "timm_model_name" in vision:
        vision["timm_model_name"] = _timm_alias(vision["timm_model_name"], spec, text)
    else:
        _check(base, vision, spec)
        install()
        vision[_WORD] = spec
    _add(name, config)
    if base in tags._PRETRAINED:  # open_clip has no other way to give a model tags
        tags._PRETRAINED[name] = tags._PRETRAINED[base]
    _known[name] = (base, text)
    return name


def install() -> None:
    """Let open_clip's image tower take the spec of an encoding as `pos_embed_type`; once is enough."""
    _DOOR.install()


def uninstall() -> None:
    """Take that away again; models that exist keep working, aliases of such towers can no longer be built."""
    _DOOR.uninstall()


def _wrapped(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: VisionTransformer, *args: Any, **kwargs: Any) -> None:
        given = len(args) > _POSITION
        spec = args[_POSITION] if given else kwargs.get(_WORD, _OPEN_CLIP_WORDS[0])
        if isinstance(spec, str) and spec in _OPEN_CLIP_WORDS:
            original(self, *args, **kwargs)
            return
        wanted = read(spec)
        if type(self) is not VisionTransformer:
            raise UnsupportedHost(
                f"{type(self).__name__}, a subclass of open_clip's VisionTransformer, was built with {_WORD}={spec!r}, "
                "but only its own constructor knows when it is complete; build it without and then call "
                "vispe.convert(tower, ...)."
            )
        if given:
            args = (*args[:_POSITION], _OPEN_CLIP_WORDS[0], *args[_POSITION + 1 :])
        else:
            kwargs[_WORD] = _OPEN_CLIP_WORDS[0]
        original(self, *args, **kwargs)
        convert_tower(self, wanted, built=True)

    return __init__


_DOOR = Door(VisionTransformer, "__init__", _wrapped)


def _check(base: str, vision: dict[str, Any], spec: Spec) -> None:
    """Raise what `vispe.convert` would raise for open_clip's own tower of this configuration."""
    vision = vars(open_clip.CLIPVisionCfg(**vision))
    if not isinstance(vision["layers"], int):
        raise UnsupportedHost(
            f"The image tower of {base} is a ResNet, which has no positional encoding between its convolutions; choose "
            "a model with a ViT tower, 'ViT-B-32' for one."
        )
    if vision[_WORD] not in _OPEN_CLIP_WORDS:
        raise OptionError(
            f"{base} has the encoding {vision[_WORD]!r} already; make an alias of the stock model instead."
        )
    names = ("image_size", "patch_size", "width", "layers", "patch_dropout", "block_type")
    options = {name: vision[name] for name in (*names, "scaled_cosine_attn")}
    heads = vision["width"] // vision["head_width"]
    with torch.device("meta"):
        convert_tower(VisionTransformer(**options, heads=heads, mlp_ratio=1), read(spec))


def _timm_alias(base: str, spec: Spec, text: str) -> str:
    """Register an architecture in timm that is `base` with the encoding, and return its name."""
    name = "vispe_" + _plain(f"{base}_{spec if isinstance(spec, str) else text}", r"\W+")
    if _known.get(name) == (base, text):
        return name
    if timm.is_model(name):
        raise OptionError(f"timm has a model {name!r} already, which is not {base} with {spec}.")
    with torch.device("meta"):
        convert_timm(timm.create_model(base, num_classes=0), read(spec))

    def build(**arguments: Any) -> torch.nn.Module:
        return timm.create_model(base, **arguments, pos_embed=spec)

    build.__name__ = build.__qualname__ = name
    build.__module__ = __name__
    register_model(build)
    _known[name] = (base, text)
    return name


def _add(name: str, config: dict[str, Any]) -> None:
    """Add a configuration to open_clip, which reads them from files and keeps what it has read."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.json"
        path.write_text(json.dumps(config), encoding="utf-8")
        open_clip.add_model_config(path)


def _json(spec: Spec) -> str:
    try:
        return json.dumps(spec, sort_keys=True)
    except TypeError:
        raise OptionError(
            f"An alias needs a spec that can be written as JSON, got {type(spec).__name__}; give a name or a dict, "
            "'alibi2d' for one."
        ) from None


def _plain(text: str, other: str = r"[^\w.+=,()-]+") -> str:
    """Return `text` with everything that a file name or identifier cannot hold replaced."""
    return re.sub(other, "_", text).strip("_")
