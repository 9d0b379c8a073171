"""The front door of timm: `create_model(..., pos_embed='alibi2d')` works once vispe is imported.

timm's ViT classes accept three words for `pos_embed` and fail without a text on any other; `NaFlexVit` has words of
its own, `Eva` has no such argument. Their constructors are wrapped in place, which serves every entry point and every
script, also those that imported `create_model` earlier. timm's own words pass through untouched. For all other
classes the builder that timm's entry points share says why the argument cannot be met.

This module is imported when timm is (`vispe.hosts.import_hooks`), maybe while another module of vispe
imports timm: what converts models is therefore imported when a model is built.
"""

from __future__ import annotations

import inspect
import pkgutil
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import timm
import timm.models
import torch
from timm.models import Eva, NaFlexVit, VisionTransformer, deit, vision_transformer
from timm.models.deit import VisionTransformerDistilled
from timm.models.naflexvit import NaFlexVitCfg
from torch import nn

from vispe.errors import UnsupportedHost
from vispe.hosts.monkeypatch import Door

if TYPE_CHECKING:
    from vispe.hosts.common.host_spec import Wanted

_TIMM_WORDS = ("", "none", "learn", None)
_NAFLEX_WORDS = ("", "none", "learned", "factorized", None)
_POSITION = (
    list(inspect.signature(VisionTransformer.__init__).parameters).index("pos_embed") - 1
)  # without self

_RELEASE = tuple(int(part) for part in timm.__version__.split(".")[:3] if part.isdigit())
# before 1.0.31 the filter of checkpoints asks for the shape of the model's table, also when there is none
_FILTERS = (vision_transformer, deit) if _RELEASE < (1, 0, 31) else ()
_BUILDER = "build_model_with_cfg"


class Recipe(NamedTuple):
    """How timm loads the weights of an architecture.

    Attributes:
        adapt: makes of a state dict in its authors' layout one of the model; None where nothing is to do.
        strict: whether entries that the model has not are errors.
    """

    adapt: Callable[..., dict[str, Any]] | None
    strict: bool


Noted = list[tuple[nn.Module, Recipe]]
_noted: ContextVar[Noted | None] = ContextVar("noted", default=None)


@contextmanager
def noted_recipes() -> Iterator[Noted]:
    """Note how timm would load the weights of each model that it builds meanwhile."""
    install()
    recipes: Noted = []
    token = _noted.set(recipes)
    try:
        yield recipes
    finally:
        _noted.reset(token)


def install() -> None:
    """Wrap the constructors; once is enough, more often does no harm."""
    for door in _doors():
        door.install()


def uninstall() -> None:
    """Take the wrappers away again; models that exist keep working."""
    for door in _doors():
        door.uninstall()


def _doors() -> Iterator[Door]:
    """Yield everything of timm that is wrapped."""
    yield from (Door(cls, "__init__", partial(wrap, cls)) for cls, wrap in _WRAPPERS.items())
    yield from (Door(module, "checkpoint_filter_fn", _without_table) for module in _FILTERS)
    # its prefixes of wrappers are dropped there, and with them what torch keeps beside the weights
    yield Door(sys.modules[timm.models.load_checkpoint.__module__], "clean_state_dict", _with_metadata)
    # each module of models has imported the shared builder by name
    for found in pkgutil.iter_modules(timm.models.__path__):
        module = sys.modules.get(f"timm.models.{found.name}")
        if hasattr(module, _BUILDER):
            yield Door(module, _BUILDER, _refusing)


def _vit(cls: type[nn.Module], original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        given = len(args) > _POSITION
        spec = args[_POSITION] if given else kwargs.get("pos_embed", "learn")
        if isinstance(spec, str | None) and spec in _TIMM_WORDS:
            original(self, *args, **kwargs)
            return
        wanted = _read(self, cls, spec, "pos_embed='none'")
        word = "learn" if wanted.keep_abs else "none"
        if given:
            args = (*args[:_POSITION], word, *args[_POSITION + 1 :])
        else:
            kwargs["pos_embed"] = word
        original(self, *args, **kwargs)
        _convert(self, wanted)

    return __init__


def _eva(cls: type[nn.Module], original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: nn.Module, *args: Any, pos_embed: Any = None, **kwargs: Any) -> None:
        if pos_embed is None:
            original(self, *args, **kwargs)
            return
        wanted = _read(self, cls, pos_embed, "no pos_embed")
        original(self, *args, **kwargs)
        _convert(self, wanted)

    return __init__


def _naflex(cls: type[nn.Module], original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: nn.Module, cfg: NaFlexVitCfg | None = None, *args: Any, **kwargs: Any) -> None:
        cfg = cfg or NaFlexVitCfg()
        spec = kwargs.get("pos_embed", cfg.pos_embed)
        if isinstance(spec, str | None) and spec in _NAFLEX_WORDS:
            original(self, cfg, *args, **kwargs)
            return
        wanted = _read(self, cls, spec, "pos_embed='none'")
        kwargs["pos_embed"] = "learned" if wanted.keep_abs else "none"
        original(self, cfg, *args, **kwargs)
        _convert(self, wanted)

    return __init__


_WRAPPERS = {VisionTransformer: _vit, VisionTransformerDistilled: _vit, Eva: _eva, NaFlexVit: _naflex}


def _read(model: nn.Module, cls: type[nn.Module], spec: Any, instead: str) -> Wanted:
    """Return what a spec asks, before anything is built."""
    from vispe.hosts.common.host_spec import read

    wanted = read(spec)
    if type(model) is not cls:
        raise UnsupportedHost(
            f"{type(model).__name__}, a subclass of timm's {cls.__name__}, was built with pos_embed={spec!r}, but "
            f"only its own constructor knows when it is complete; build it with {instead} and then call "
            "vispe.convert(model, ...)."
        )
    return wanted


def _convert(model: nn.Module, wanted: Wanted) -> None:
    from vispe.hosts.timm.convert import convert_timm

    convert_timm(model, wanted, built=True)


def _refusing(original: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Return timm's builder, which says why before it builds a model that cannot take the encoding asked for."""

    def build_model_with_cfg(model_cls: Any, *args: Any, **kwargs: Any) -> nn.Module:
        from vispe.hosts.timm.families import FAMILIES
        from vispe.hosts.timm.unsupported import refusal
        from vispe.hosts.windows.model_table import known

        spec = kwargs.get("pos_embed")
        if spec is not None and isinstance(model_cls, type) and known(model_cls):
            from vispe.hosts.convert import convert

            # the stock model gets its weights first: timm reads its tables when it loads them
            rest = {name: value for name, value in kwargs.items() if name != "pos_embed"}
            features = rest.pop("features_only", False)
            plain = (
                {name: value for name, value in rest.items() if name != "feature_cls"} if features else rest
            )
            model = convert(build_model_with_cfg(model_cls, *args, **plain), spec)
            if not features:
                return model
            rest = {**rest, "pretrained": False, "features_only": True}
            return original(lambda **_: model, *args[:1], **rest)
        ours = not isinstance(model_cls, type) or issubclass(model_cls, tuple(f.base for f in FAMILIES))
        if spec is not None and not ours and "pos_embed" not in inspect.signature(model_cls).parameters:
            raise UnsupportedHost(f"pos_embed={spec!r} was asked. {refusal(model_cls)}")
        model = original(model_cls, *args, **kwargs)
        if (noted := _noted.get()) is not None:
            recipe = Recipe(kwargs.get("pretrained_filter_fn"), kwargs.get("pretrained_strict", True))
            noted.append((model, recipe))
        return model

    return build_model_with_cfg


def _without_table(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    def checkpoint_filter_fn(
        state_dict: dict[str, Any], model: VisionTransformer, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        from vispe.hosts.timm.vit import HostedViT

        if not isinstance(model, HostedViT) or model.pos_embed is not None:
            return original(state_dict, model, *args, **kwargs)
        entries = model.patch_embed.num_patches + (0 if model.no_embed_class else model.num_prefix_tokens)
        model.pos_embed = nn.Parameter(torch.empty(1, entries, model.embed_dim, device="meta"))
        try:
            filtered = original(state_dict, model, *args, **kwargs)
        finally:
            model.pos_embed = None
        filtered.pop("pos_embed", None)
        return filtered

    return checkpoint_filter_fn


def _with_metadata(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Return timm's function that drops prefixes of wrappers, which also keeps what torch keeps beside the weights."""

    def clean_state_dict(state_dict: dict[str, Any]) -> dict[str, Any]:
        cleaned = OrderedDict(original(state_dict))
        metadata = getattr(state_dict, "_metadata", None)
        if metadata is not None:
            cleaned._metadata = {
                next(iter(original({f"{name}.": None}))).removesuffix("."): kept
                for name, kept in metadata.items()
            }
        return cleaned

    return clean_state_dict
