"""What people wrap models in, and whether the model inside can still be converted.

A wrapper that hands every forward pass to the module inside is looked through. One that has read the module's
parameters or code is refused, because what a conversion adds would stay unknown to it: processes would not average its
gradients, or a graph would go on without it.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from vispe.errors import UnsupportedHost
from vispe.hosts.common.equivalent_models import advice
from vispe.hosts.timm.families import family_of
from vispe.hosts.timm.unsupported import refusal
from vispe.hosts.transformers.diagnosis import supported_part

# class name: where the model is
_OPEN = {"DataParallel": "module", "FeatureGetterNet": "model"}
# class name: where the model is, and what the wrapper knows of it
_CLOSED = {
    "DistributedDataParallel": ("module", "has set up which gradients its processes average"),
    "FullyShardedDataParallel": ("module", "has divided its parameters among the processes"),
    "OptimizedModule": ("_orig_mod", "compiles its code"),
}
_REBUILT = ("FeatureListNet", "FeatureDictNet", "FeatureHookNet", "FeatureGraphNet")
_REBUILT += ("GraphModule", "DualGraphModule")


def unwrapped(model: nn.Module, function: str = "convert") -> nn.Module:
    """Return the model inside wrappers that can be looked through; itself if there are none.

    Args:
        model: wrapped or not.
        function: of vispe that was called, for messages.

    Raises:
        UnsupportedHost: a wrapper knows parameters or code of the model inside.
    """
    path = "model"
    while True:
        libraries = ("torch", "timm")
        names = [c.__name__ for c in type(model).__mro__ if c.__module__.partition(".")[0] in libraries]
        closed = next((n for n in names if n in _CLOSED), None)
        if closed:
            inside, reason = _CLOSED[closed]
            raise UnsupportedHost(
                f"The model is wrapped in {closed}, which {reason}, so what is added now would be left out; convert "
                f"the model inside first, vispe.convert({path}.{inside}, ...), and wrap it again."
            )
        if "FSDPModule" in names:
            raise UnsupportedHost(
                "The model is sharded by fully_shard, which has divided its parameters among the processes; convert "
                "it first and shard it then."
            )
        rebuilt = next((n for n in names if n in _REBUILT), None)
        if rebuilt:
            raise UnsupportedHost(
                f"The model is a {rebuilt}, made of parts of another model, whose own forward pass is gone; convert "
                "that model first, or build it with pos_embed=..., and take features from it then."
            )
        if (adapted := without_adapters(model)) is not model:
            model, path = adapted, f"{path}.get_base_model()"
            continue
        if callable(getattr(model, "get_base_model", None)):
            raise UnsupportedHost(
                f"vispe.{function}: the model is wrapped in a {type(model).__name__}, which adds adapters. Call "
                f"vispe.{function} with the model inside, {path}.get_base_model(); it is changed in place, and the "
                "adapters stay."
            )
        inner = next((_OPEN[n] for n in names if n in _OPEN), None)
        if inner is None:
            return model
        model, path = getattr(model, inner), f"{path}.{inner}"


def opened(model: nn.Module) -> nn.Module:
    """Return the model inside all wrappers, also those that cannot be converted through; for reading only."""
    while True:
        libraries = ("torch", "timm")
        names = [c.__name__ for c in type(model).__mro__ if c.__module__.partition(".")[0] in libraries]
        attributes = _OPEN | {name: attribute for name, (attribute, _) in _CLOSED.items()}
        inner = next((attributes[n] for n in names if n in attributes), None)
        if callable(get_base_model := getattr(model, "get_base_model", None)):
            model = get_base_model()
        elif inner is not None:
            model = getattr(model, inner)
        else:
            return model


def without_adapters(model: Any) -> nn.Module:
    """Return the model inside a `PeftModel` of peft; itself where it is another one, or a model of transformers."""
    classes = {f"{c.__module__.partition('.')[0]}.{c.__name__}" for c in type(model).__mro__}
    if "peft.PeftModel" not in classes:
        return model
    base = model.get_base_model()
    hub = any(c.__module__.partition(".")[0] == "transformers" for c in type(base).__mro__)
    return model if hub else base


def unknown(model: nn.Module) -> str:
    """Return why a model is not converted, and what to convert instead."""
    cls = type(model)
    text = f"vispe.convert was given a {cls.__name__} of {cls.__module__.partition('.')[0]}."
    paths = [name for name, part in model.named_modules() if name and family_of(part) is not None]
    if paths:
        calls = [f"vispe.convert({_spelled(path)}, ...)" for path in paths[:3]]
        return f"{text} Inside it there is a model that takes an encoding: {' or '.join(calls)}."
    if path := supported_part(model):
        return f"{text} Inside it there is a model that takes a position scheme: vispe.convert({_spelled(path)}, ...)."
    if any(c.__module__.startswith("timm.models.") for c in cls.__mro__):
        return f"{text} {refusal(cls)}"
    return (
        f"{text} It knows timm's VisionTransformer, VisionTransformerDistilled, Eva and NaFlexVit, image towers of "
        "open_clip, models of transformers, SAM, Swin and MaxViT of timm, torchvision's ViT and Swin, and MONAI. "
        f"{advice(model) or 'Give it the vision tower, or use vispe.Attention in your own blocks.'}"
    )


def _spelled(path: str) -> str:
    if all(part.isidentifier() for part in path.split(".")):
        return f"model.{path}"
    return f"model.get_submodule({path!r})"
