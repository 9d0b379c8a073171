"""Detection of wrappers (DDP, FSDP, compile and similar), and unwrapping where possible.

A wrapper that only forwards calls to its module is unwrapped. A wrapper that has registered the parameters or
compiled the code of its module is rejected, because it would ignore a conversion: gradients of new parameters
would not be averaged between processes, or the compiled graph would run without the encoding.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from vispe.errors import UnsupportedHost
from vispe.hosts.common.equivalent_models import advice
from vispe.hosts.transformers.diagnosis import supported_part

# class name: attribute of the wrapped model
_TRANSPARENT = {"DataParallel": "module", "FeatureGetterNet": "model"}
# class name: attribute of the wrapped model, and reason why the wrapper would ignore a conversion
_OPAQUE = {
    "DistributedDataParallel": ("module", "has set up which gradients its processes average"),
    "FullyShardedDataParallel": ("module", "has divided its parameters among the processes"),
    "OptimizedModule": ("_orig_mod", "compiles its code"),
}
_REBUILT = ("FeatureListNet", "FeatureDictNet", "FeatureHookNet", "FeatureGraphNet")
_REBUILT += ("GraphModule", "DualGraphModule")


def unwrap(model: nn.Module, function: str = "convert") -> nn.Module:
    """Return the model inside transparent wrappers; `model` itself if there are none.

    Args:
        model: a model, wrapped or not.
        function: name of the calling function of vispe, for messages.

    Raises:
        UnsupportedHost: a wrapper has registered parameters or compiled code of the model inside.
    """
    path = "model"
    while True:
        libraries = ("torch", "timm")
        names = [c.__name__ for c in type(model).__mro__ if c.__module__.partition(".")[0] in libraries]
        opaque = next((n for n in names if n in _OPAQUE), None)
        if opaque:
            inside, reason = _OPAQUE[opaque]
            raise UnsupportedHost(
                f"The model is wrapped in {opaque}, which {reason}, so new parameters would not be registered. Convert "
                f"the model inside first, vispe.convert({path}.{inside}, ...), and wrap it again."
            )
        if "FSDPModule" in names:
            raise UnsupportedHost(
                "The model is sharded by fully_shard, which has divided its parameters among the processes. Convert "
                "the model before sharding it."
            )
        rebuilt = next((n for n in names if n in _REBUILT), None)
        if rebuilt:
            raise UnsupportedHost(
                f"The model is a {rebuilt}, rebuilt from parts of another model without its forward pass. Convert the "
                "original model first, or build it with pos_embed=..., and extract features from it afterwards."
            )
        if (adapted := without_adapters(model)) is not model:
            model, path = adapted, f"{path}.get_base_model()"
            continue
        if callable(getattr(model, "get_base_model", None)):
            raise UnsupportedHost(
                f"vispe.{function}: the model is wrapped in a {type(model).__name__}, which adds adapters. Call "
                f"vispe.{function} with the model inside, {path}.get_base_model(); it is changed in place, and the "
                "adapters are preserved."
            )
        inner = next((_TRANSPARENT[n] for n in names if n in _TRANSPARENT), None)
        if inner is None:
            return model
        model, path = getattr(model, inner), f"{path}.{inner}"


def unwrap_all(model: nn.Module) -> nn.Module:
    """Return the model inside all wrappers, opaque ones included; for reading only."""
    while True:
        libraries = ("torch", "timm")
        names = [c.__name__ for c in type(model).__mro__ if c.__module__.partition(".")[0] in libraries]
        attributes = _TRANSPARENT | {name: attribute for name, (attribute, _) in _OPAQUE.items()}
        inner = next((attributes[n] for n in names if n in attributes), None)
        if callable(get_base_model := getattr(model, "get_base_model", None)):
            model = get_base_model()
        elif inner is not None:
            model = getattr(model, inner)
        else:
            return model


def without_adapters(model: Any) -> nn.Module:
    """Return the model inside a `PeftModel` of peft; `model` itself for other classes and models of transformers."""
    classes = {f"{c.__module__.partition('.')[0]}.{c.__name__}" for c in type(model).__mro__}
    if "peft.PeftModel" not in classes:
        return model
    base = model.get_base_model()
    hub = any(c.__module__.partition(".")[0] == "transformers" for c in type(base).__mro__)
    return model if hub else base


def unsupported_message(model: nn.Module) -> str:
    """Return the error message for a model that cannot be converted, with what to convert instead."""
    # not at the top: the names of timm are checked first (`vispe.hosts.contracts`)
    from vispe.hosts.timm.families import family_of
    from vispe.hosts.timm.unsupported import refusal

    cls = type(model)
    text = f"vispe.convert: unsupported model, got a {cls.__name__} of {cls.__module__.partition('.')[0]}."
    paths = [name for name, part in model.named_modules() if name and family_of(part) is not None]
    if paths:
        calls = [f"vispe.convert({_accessor(path)}, ...)" for path in paths[:3]]
        return f"{text} It contains a model that supports encodings: {' or '.join(calls)}."
    if path := supported_part(model):
        return f"{text} It contains a model that supports position schemes: vispe.convert({_accessor(path)}, ...)."
    if any(c.__module__.startswith("timm.models.") for c in cls.__mro__):
        return f"{text} {refusal(cls)}"
    return (
        f"{text} Supported are timm's VisionTransformer, VisionTransformerDistilled, Eva and NaFlexVit, image towers "
        "of open_clip, models of transformers, SAM, Swin and MaxViT of timm, torchvision's ViT and Swin, and MONAI. "
        f"{advice(model) or 'Pass the vision tower, or use vispe.Attention in your own blocks.'}"
    )


def _accessor(path: str) -> str:
    if all(part.isidentifier() for part in path.split(".")):
        return f"model.{path}"
    return f"model.get_submodule({path!r})"
