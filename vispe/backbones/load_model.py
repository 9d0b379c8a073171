"""Models by name: the spellings that all commands and Python functions share, and their loading.

Libraries are imported on demand, as importing timm takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from vispe.errors import InputError, OptionError, UnknownName
from vispe.utils.options import PositiveInt, Seed, read_option

if TYPE_CHECKING:
    from vispe.backbones.vision_model import VisionModel

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
_OPTIONS: dict[str, tuple[str, ...]] = {
    "timm": ("pos_embed", "weights", "img_size", "options"),
    "open_clip": ("pos_embed", "weights", "img_size"),
    "debiased": ("img_size",),
    "micro": ("weights",),
}


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model loaded by name.

    Attributes:
        kind: kind of the name, see `SPELLINGS`.
        model: the vision model in evaluation mode; the image tower of open_clip models; a Python callable.
        settings: arguments `mean`, `std` and `exact` of `VisionModel`, if they are not those of the model.
        whole: the text-aligned model that contains the image tower; None without one.
        reader: called without arguments, returns the tokenizer (open_clip) or the processor (transformers) of `whole`.
    """

    kind: Kind
    model: Any
    settings: dict[str, Any] = field(default_factory=dict)
    whole: nn.Module | None = None
    reader: Callable[[], Any] | None = None


def kind_of(name: str | Path) -> Kind:
    """Return the kind of a model name; names without a known prefix or file are those of timm.

    >>> [kind_of(name) for name in ("vit_small_patch14_dinov2", "open_clip:ViT-B-32/openai", "hf:folder")]
    ['timm', 'open_clip', 'transformers']
    >>> [kind_of(name) for name in ("vispe_micro", "out/model.vispe", "math:floor")]
    ['micro', 'segmenter', 'callable']
    """
    from vispe.backbones.local.debiased import is_debiased
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


def load_model(
    name: str | Path,
    *,
    pos_embed: str | None = None,
    weights: str | None = None,
    img_size: Any = None,
    any_size: bool = False,
    options: dict[str, Any] | None = None,
    seed: int = 0,
    kinds: Iterable[str] = (*NETWORKS, "micro", "callable"),
    parameter: str = "model",
) -> LoadedModel:
    """Load a model by name, in evaluation mode on the CPU.

    Args:
        name: a timm model, `hf-hub:OWNER/NAME` or `local-dir:FOLDER`; `open_clip:MODEL/TAG`, or `open_clip:MODEL`
            with weights, or `open_clip:` before `hf-hub:` or `local-dir:`; `hf:OWNER/NAME` or `hf:FOLDER`, a vision
            model of transformers, or a model with an image tower; the folder of a finished `vispe retrofit`, or of
            `vispe debias`; `vispe_micro`; or a Python callable, `package.module:name` or `file.py:name`. A saved
            segmenter (`.vispe`) is opened by `vispe.evaluate.evaluated.load_evaluated_model`.
        pos_embed: positional encoding that replaces the model's own.
        weights: checkpoint file, or 'random'; default: the pretrained weights.
        img_size: image size in pixels.
        any_size: let a timm model accept images of any size, if its class supports it.
        options: further arguments of `timm.create_model`.
        seed: seed of random weights.
        kinds: the supported kinds of names.
        parameter: name of the parameter that contains `name`, for messages.

    Raises:
        UnknownName: there is no such model.
        InputError: weights are missing, cannot be downloaded or do not match the model.
        OptionError: another kind of name than `kinds`, an option without effect, or an unsupported image size.
        UnsupportedHost: the model has no image tower.

    >>> type(load_model("test_vit", weights="random").model).__name__
    'VisionTransformer'
    """
    name, kind = str(name), check_kind(name, kinds, parameter)
    img_size = read_option("img_size", img_size, PositiveInt | tuple[PositiveInt, PositiveInt] | None)
    seed = read_option("seed", seed, Seed)
    values = {"pos_embed": pos_embed, "weights": weights, "img_size": img_size, "options": options or None}
    refuse_options(name, {k: v for k, v in values.items() if k not in _OPTIONS.get(kind, ())})
    if kind == "timm":
        from vispe.backbones.timm import load_backbone

        try:
            return LoadedModel(kind, load_backbone(name, any_size=any_size, seed=seed, **values))
        except UnknownName as error:
            if Path(name).is_dir():
                raise InputError(
                    f"{parameter}: the folder contains no finished retrofit, got {name}. For a folder of timm or "
                    f"transformers, use local-dir:{name} or hf:{name}."
                ) from error
            raise UnknownName(f"{error} Supported names: {spellings(kinds)}.") from error
    if kind == "open_clip":
        from vispe.backbones.clip_weights import load_clip, tokenizer_of, tower_of

        plain = name.removeprefix(CLIP)
        whole = load_clip(plain, pos_embed=pos_embed, weights=weights, img_size=img_size, seed=seed)
        return LoadedModel(kind, tower_of(whole), whole=whole, reader=partial(tokenizer_of, plain))
    if kind == "transformers":
        from vispe.backbones.local.transformers_model import (
            TransformersModel,
            colours,
            load_transformers,
            processor_of,
        )

        whole = load_transformers(name)
        tower = TransformersModel(whole, *colours(name)).eval()
        return LoadedModel(kind, tower, whole=whole, reader=partial(processor_of, name))
    if kind in ("retrofit", "debiased"):
        from vispe.backbones.local.retrofitted import load_retrofitted

        student = load_retrofitted(name) if kind == "retrofit" else load_debiased(name, img_size)
        settings = {key: getattr(student, key) for key in ("mean", "std", "exact")}
        return LoadedModel(kind, student.model, settings)
    if kind == "micro":
        from vispe.backbones.micro import load_micro

        return LoadedModel(kind, load_micro(weights))
    from vispe.backbones.user_callables import named_callable

    source, _, attribute = name.rpartition(":")
    function = named_callable(name, source, attribute)
    return LoadedModel(kind, function.eval() if isinstance(function, nn.Module) else function)


def load_debiased(folder: str | Path, img_size: Any = None) -> VisionModel:
    """Return the model of a folder that `vispe debias` wrote, as a function of images; its weights are loaded by name.

    Args:
        folder: the folder.
        img_size: image size in pixels; by default that of `vispe debias`.

    Raises:
        InputError: the folder is damaged, or the model or its weights are missing.
        OptionError: the model is not built for an image size.
        UnknownName, UnsupportedHost: the model is unknown.
    """
    from vispe.backbones.hub import named_by_file
    from vispe.backbones.local.debiased import DebiasedModel, read_debiased
    from vispe.backbones.vision_model import VisionModel

    arguments, debiasing = read_debiased(folder)
    arguments["img_size"] = arguments["img_size"] if img_size is None else img_size
    # a record is a foreign file, so it may name a network only, never Python code or another record
    kinds = tuple(kind for kind in NETWORKS if kind != "debiased")
    with named_by_file():
        loaded = load_model(**arguments, any_size=True, kinds=kinds, parameter=f"{folder}: model")
    # normalisation of retrofits may differ from that of their class
    base = VisionModel(loaded.model, **loaded.settings)
    settings = {"mean": base.mean, "std": base.std, "exact": base.exact}
    return VisionModel(DebiasedModel(loaded.model, debiasing).eval(), **settings)


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
    from vispe.backbones.local.debiased import read_debiased

    kind = kind_of(name)
    if kind == "debiased":
        kind = kind_of(read_debiased(name)[0]["name"])
    return "img_size" in _OPTIONS.get(kind, ())


def has_weights(name: str) -> bool:
    """Return whether a model name includes its weights, which need no option.

    >>> has_weights("open_clip:ViT-B-32/openai"), has_weights("vit_small_patch14_dinov2")
    (True, False)
    """
    kind = kind_of(name)
    tagged = "/" in name or name.startswith(tuple(CLIP + prefix for prefix in _TIMM))
    return tagged if kind == "open_clip" else kind != "timm"
