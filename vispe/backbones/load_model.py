"""Loading of models by name, for all commands and Python functions.

Libraries are imported on demand, as importing timm takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from vispe.backbones.model_names import CLIP, NETWORKS, OPTIONS, Kind, check_kind, refuse_options, spellings
from vispe.errors import InputError, UnknownName
from vispe.utils.option_values import read_option
from vispe.utils.options import PositiveInt, Seed

if TYPE_CHECKING:
    from vispe.backbones.vision_model import VisionModel


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
    refuse_options(name, {k: v for k, v in values.items() if k not in OPTIONS.get(kind, ())})
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
        complete = load_clip(plain, pos_embed=pos_embed, weights=weights, img_size=img_size, seed=seed)
        return LoadedModel(kind, tower_of(complete), whole=complete, reader=partial(tokenizer_of, plain))
    if kind == "transformers":
        from vispe.backbones.local.transformers_files import load_transformers, normalization_of, processor_of
        from vispe.backbones.local.transformers_model import TransformersModel

        complete = load_transformers(name)
        tower = TransformersModel(complete, *normalization_of(name)).eval()
        return LoadedModel(kind, tower, whole=complete, reader=partial(processor_of, name))
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
    from vispe.backbones.local.debiased import DebiasedModel
    from vispe.backbones.local.debiased_folder import read_debiased
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
