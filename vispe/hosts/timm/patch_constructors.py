"""Monkey patches of timm's constructors, for `create_model(..., pos_embed='alibi2d')`.

timm's ViT classes accept three values of `pos_embed` and fail with an assertion without message for all
others; `NaFlexVit` accepts different values, and `Eva` has no such argument. Their constructors are patched
in place, so that the patch is effective for every entry point, and for scripts that imported `create_model`
earlier. timm's own values are passed on unchanged. For all other classes timm's shared builder raises an
error with the reason.

This module is imported together with timm (`vispe.hosts.import_hooks`), possibly while another module of vispe
imports timm, so the code that converts models is imported only when a model is built.
"""

from __future__ import annotations

import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import timm.models
from timm.models import Eva, NaFlexVit, VisionTransformer
from timm.models.deit import VisionTransformerDistilled
from timm.models.naflexvit import NaFlexVitCfg
from torch import nn

from vispe.errors import UnsupportedHost
from vispe.hosts.monkeypatch import Patch
from vispe.hosts.timm.patch_checkpoints import checkpoint_patches

if TYPE_CHECKING:
    from vispe.hosts.common.host_spec import HostSpec

_TIMM_VALUES = ("", "none", "learn", None)
_NAFLEX_VALUES = ("", "none", "learned", "factorized", None)
# without self
_POSITION = list(inspect.signature(VisionTransformer.__init__).parameters).index("pos_embed") - 1

_BUILDER = "build_model_with_cfg"


class LoadingRecipe(NamedTuple):
    """How timm loads the weights of an architecture.

    Attributes:
        adapt: converts a state dict in the authors' layout to that of the model; None if they are equal.
        strict: whether unexpected entries are errors.
    """

    adapt: Callable[..., dict[str, Any]] | None
    strict: bool


Recipes = list[tuple[nn.Module, LoadingRecipe]]
_recipes: ContextVar[Recipes | None] = ContextVar("noted", default=None)


@contextmanager
def recorded_recipes() -> Iterator[Recipes]:
    """Record how timm would load the weights of each model built inside the ``with`` statement."""
    install()
    recipes: Recipes = []
    token = _recipes.set(recipes)
    try:
        yield recipes
    finally:
        _recipes.reset(token)


def install() -> None:
    """Install all patches of timm; idempotent."""
    for patch in _patches():
        patch.install()


def uninstall() -> None:
    """Remove all patches of timm; existing models keep working."""
    for patch in _patches():
        patch.uninstall()


def _patches() -> Iterator[Patch]:
    yield from (Patch(cls, "__init__", partial(wrap, cls)) for cls, wrap in _WRAPPERS.items())
    yield from checkpoint_patches()
    # each module of timm.models has imported the shared builder by name
    for info in pkgutil.iter_modules(timm.models.__path__):
        module = sys.modules.get(f"timm.models.{info.name}")
        if hasattr(module, _BUILDER):
            yield Patch(module, _BUILDER, _checking)


def _vit(cls: type[nn.Module], original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        positional = len(args) > _POSITION
        spec = args[_POSITION] if positional else kwargs.get("pos_embed", "learn")
        if isinstance(spec, str | None) and spec in _TIMM_VALUES:
            original(self, *args, **kwargs)
            return
        host_spec = _parse(self, cls, spec, "pos_embed='none'")
        value = "learn" if host_spec.keep_abs else "none"
        if positional:
            args = (*args[:_POSITION], value, *args[_POSITION + 1 :])
        else:
            kwargs["pos_embed"] = value
        original(self, *args, **kwargs)
        _convert(self, host_spec)

    return __init__


def _eva(cls: type[nn.Module], original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: nn.Module, *args: Any, pos_embed: Any = None, **kwargs: Any) -> None:
        if pos_embed is None:
            original(self, *args, **kwargs)
            return
        host_spec = _parse(self, cls, pos_embed, "no pos_embed")
        original(self, *args, **kwargs)
        _convert(self, host_spec)

    return __init__


def _naflex(cls: type[nn.Module], original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: nn.Module, cfg: NaFlexVitCfg | None = None, *args: Any, **kwargs: Any) -> None:
        cfg = cfg or NaFlexVitCfg()
        spec = kwargs.get("pos_embed", cfg.pos_embed)
        if isinstance(spec, str | None) and spec in _NAFLEX_VALUES:
            original(self, cfg, *args, **kwargs)
            return
        host_spec = _parse(self, cls, spec, "pos_embed='none'")
        kwargs["pos_embed"] = "learned" if host_spec.keep_abs else "none"
        original(self, cfg, *args, **kwargs)
        _convert(self, host_spec)

    return __init__


_WRAPPERS = {VisionTransformer: _vit, VisionTransformerDistilled: _vit, Eva: _eva, NaFlexVit: _naflex}


def _parse(model: nn.Module, cls: type[nn.Module], spec: Any, instead: str) -> HostSpec:
    """Parse a spec before anything is built; raise `UnsupportedHost` for subclasses of `cls`."""
    from vispe.hosts.common.host_spec import parse_host_spec
    from vispe.hosts.contracts.check import check_contracts_of

    check_contracts_of("timm")
    host_spec = parse_host_spec(spec)
    # the constructor of a subclass may not be complete when that of timm's class returns
    if type(model) is not cls:
        raise UnsupportedHost(
            f"{type(model).__name__}: subclasses of timm's {cls.__name__} do not support encodings in the constructor, "
            f"got pos_embed={spec!r}. Build it with {instead} and then call vispe.convert(model, ...)."
        )
    return host_spec


def _convert(model: nn.Module, spec: HostSpec) -> None:
    from vispe.hosts.common.conversion.convert import convert_model
    from vispe.hosts.common.host_families import family_of

    convert_model(model, family_of(model), spec, built=True)


def _checking(original: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Wrap timm's builder: convert windowed models, and raise an error for classes that do not take `pos_embed`."""

    def build_model_with_cfg(model_cls: Any, *args: Any, **kwargs: Any) -> nn.Module:
        spec = kwargs.get("pos_embed")
        if spec is not None and _has_windows(model_cls):
            from vispe.hosts.convert import convert

            # weights are loaded into the stock model, as timm resamples its tables on loading
            options = {name: value for name, value in kwargs.items() if name != "pos_embed"}
            features = options.pop("features_only", False)
            stock_options = (
                {name: value for name, value in options.items() if name != "feature_cls"}
                if features
                else options
            )
            model = convert(build_model_with_cfg(model_cls, *args, **stock_options), spec)
            if not features:
                return model
            options = {**options, "pretrained": False, "features_only": True}
            return original(lambda **_: model, *args[:1], **options)
        if spec is not None:
            _check_accepts(model_cls, spec)
        model = original(model_cls, *args, **kwargs)
        if (recipes := _recipes.get()) is not None:
            recipe = LoadingRecipe(kwargs.get("pretrained_filter_fn"), kwargs.get("pretrained_strict", True))
            recipes.append((model, recipe))
        return model

    return build_model_with_cfg


def _has_windows(model_cls: Any) -> bool:
    """Return whether the layers of a class of models have grids of their own."""
    from vispe.hosts.contracts.check import check_contracts_of

    check_contracts_of("timm")  # before other modules import the names of timm
    from vispe.hosts.windows.model_table import known

    return isinstance(model_cls, type) and known(model_cls)


def _check_accepts(model_cls: Any, spec: Any) -> None:
    """Raise `UnsupportedHost` if a class of models neither supports encodings nor has an argument `pos_embed`."""
    from vispe.hosts.timm.families import FAMILIES
    from vispe.hosts.timm.unsupported import refusal

    ours = not isinstance(model_cls, type) or issubclass(model_cls, tuple(f.base for f in FAMILIES))
    if not ours and "pos_embed" not in inspect.signature(model_cls).parameters:
        raise UnsupportedHost(f"pos_embed={spec!r} is not supported. {refusal(model_cls)}")
