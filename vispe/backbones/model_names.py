"""Names of models: the spellings that all commands and Python functions share."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from vispe.errors import OptionError

Kind = Literal["timm", "open_clip", "transformers", "retrofit", "debiased", "micro", "callable", "segmenter"]
SPELLINGS: dict[str, tuple[str, str]] = {
    "timm": ("a timm model", "a timm name, hf-hub:OWNER/NAME or local-dir:FOLDER"),
    "open_clip": ("an open_clip model", "open_clip:MODEL/TAG"),
    "transformers": ("a transformers model", "hf:OWNER/NAME or hf:FOLDER"),
    "retrofit": ("a retrofit", "the folder of a finished vispe retrofit"),
    "debiased": ("a debiased model", "a folder of vispe debias"),
    "micro": ("the shipped backbone", "vispe_micro"),
    "callable": ("a Python callable", "package.module:name or file.py:name"),
    "segmenter": ("a saved segmenter", "a .vispe file"),
}
"""Each kind of model, what it is, and how its name is spelled."""

NETWORKS = ("timm", "open_clip", "transformers", "retrofit", "debiased")
"""Kinds that are vision models with blocks and feature maps."""

MICRO, CLIP, TRANSFORMERS = "vispe_micro", "open_clip:", "hf:"
_TIMM = ("hf-hub:", "hf_hub:", "local-dir:")
_FOLDER_PREFIXES = ("local-dir", "hf", "open_clip:local-dir")
OPTIONS: dict[str, tuple[str, ...]] = {
    "timm": ("pos_embed", "weights", "img_size", "options"),
    "open_clip": ("pos_embed", "weights", "img_size"),
    "debiased": ("img_size",),
    "micro": ("weights",),
}
"""Options of `load_model` that have an effect, by kind of name."""


def kind_of(name: str | Path) -> Kind:
    """Return the kind of a model name; names without a known prefix or file are those of timm.

    >>> [kind_of(name) for name in ("vit_small_patch14_dinov2", "open_clip:ViT-B-32/openai", "hf:folder")]
    ['timm', 'open_clip', 'transformers']
    >>> [kind_of(name) for name in ("vispe_micro", "out/model.vispe", "math:floor")]
    ['micro', 'segmenter', 'callable']
    """
    from vispe.backbones.local.debiased_folder import is_debiased
    from vispe.backbones.local.retrofitted import is_retrofitted

    name = str(name)
    if name == MICRO:
        return "micro"
    if name.endswith(".vispe"):
        return "segmenter"
    prefixes = ((CLIP, "open_clip"), (TRANSFORMERS, "transformers"), *((prefix, "timm") for prefix in _TIMM))
    for prefix, kind in prefixes:
        if name.startswith(prefix):
            return kind
    if is_retrofitted(name):
        return "retrofit"
    if is_debiased(name):
        return "debiased"
    return "callable" if ":" in name else "timm"


def absolute_name(name: str) -> str:
    """Return a model name in which the folder of the model, if there is one, is absolute.

    >>> absolute_name("vit_small_patch14_dinov2")
    'vit_small_patch14_dinov2'
    """
    if kind_of(name) in ("retrofit", "debiased"):
        return str(Path(name).resolve())
    prefix, _, folder = name.rpartition(":")
    if prefix in _FOLDER_PREFIXES and Path(folder).is_dir():
        return f"{prefix}:{Path(folder).resolve()}"
    return name


def spellings(kinds: Iterable[str]) -> str:
    """Return how the names of some kinds of models are spelled, as a list in a sentence.

    >>> spellings(["open_clip", "micro"])
    'open_clip:MODEL/TAG; or vispe_micro'
    """
    *others, last = [SPELLINGS[kind][1] for kind in SPELLINGS if kind in kinds]
    return "; ".join([*others, f"or {last}" if others else last])


def check_kind(name: str | Path, kinds: Iterable[str], parameter: str = "model") -> Kind:
    """Return the kind of a model name, if it is one of some kinds.

    Args:
        name: the model name.
        kinds: the supported kinds.
        parameter: name of the parameter for messages.

    Raises:
        OptionError: another kind of model.
    """
    kind = kind_of(name)
    if kind not in kinds:
        raise OptionError(
            f"{parameter} does not support {SPELLINGS[kind][0]} here, got {name}. Use {spellings(kinds)}."
        )
    return kind


def refuse_options(name: str, options: dict[str, Any]) -> None:
    """Raise OptionError for the first option that is set, since it has no effect on this kind of model."""
    key = next((key for key, value in options.items() if value is not None), None)
    if key is not None:
        raise OptionError(
            f"{key}={options[key]!r} has no effect on {name}, which is loaded as {SPELLINGS[kind_of(name)][0]}. Omit "
            "it."
        )


def accepts_img_size(name: str) -> bool:
    """Return whether a model can be built for an image size; other models have that of their weights.

    >>> accepts_img_size("vit_small_patch14_dinov2"), accepts_img_size("hf:folder")
    (True, False)
    """
    from vispe.backbones.local.debiased_folder import read_debiased

    kind = kind_of(name)
    if kind == "debiased":
        kind = kind_of(read_debiased(name)[0]["name"])
    return "img_size" in OPTIONS.get(kind, ())


def has_weights(name: str) -> bool:
    """Return whether a model name includes its weights, which need no option.

    >>> has_weights("open_clip:ViT-B-32/openai"), has_weights("vit_small_patch14_dinov2")
    (True, False)
    """
    kind = kind_of(name)
    tagged = "/" in name or name.startswith(tuple(CLIP + prefix for prefix in _TIMM))
    return tagged if kind == "open_clip" else kind != "timm"
