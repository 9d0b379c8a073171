"""Patches of saving and loading in transformers, so that a conversion is never lost silently.

`PreTrainedModel.save_pretrained` and `from_pretrained` are patched when transformers' base class is imported
(`vispe.hosts.import_hooks`); other models are not affected. The code that converts models is imported only when a
model is saved or loaded.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any

from torch import nn

from vispe.errors import InputError, counted
from vispe.hosts.monkeypatch import Patch
from vispe.hosts.transformers.saving import config_record
from vispe.hosts.transformers.subclasses import Named, complete_with, converted_subclass, converting, stock_of


def install() -> None:
    """Patch the two methods; idempotent."""
    complete_with(_complete)
    for patch in _patches():
        patch.install()


def uninstall() -> None:
    """Remove the patches."""
    for patch in _patches():
        patch.uninstall()


def _patches() -> tuple[Patch, ...]:
    """Return the patches of the base class of all models; importing it also installs them."""
    base = importlib.import_module("transformers.modeling_utils").PreTrainedModel
    return Patch(base, "from_pretrained", _loading), Patch(base, "save_pretrained", _saving)


def _complete(model: nn.Module, requested: type) -> None:
    """Convert a model that was built by calling the class of a converted one, as its configuration names."""
    from vispe.hosts.transformers.convert import complete

    complete(model, requested)


def _saving(original: Callable[..., None]) -> Callable[..., None]:
    def save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        with config_record.exact(self) as configs:
            # no warning for towers of timm, which transformers builds from `model_args`
            entries = [config_record.read(config) for config in configs if not hasattr(config, "model_args")]
            if entries:
                warnings.warn(
                    f"{type(self).__name__} is saved with {' and '.join(map(config_record.shown, entries))}, which "
                    f"from_pretrained of transformers does not build; load it with vispe.from_pretrained.",
                    UserWarning,
                    stacklevel=2,
                )
            original(self, *args, **kwargs)

    return save_pretrained


def _loading(original: Any) -> Any:
    def from_pretrained(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
        if stock_of(cls) is None and not converting.get():
            loaded = original(cls, *args, **kwargs)
            _warn_missing(loaded[0] if isinstance(loaded, tuple) else loaded)
            return loaded
        built = converted_subclass(stock_of(cls) or cls, Named) if converting.get() else cls
        # towers that a constructor loads by itself are loaded without conversion
        token = converting.set(False)
        try:
            return _strictly(functools.partial(original, built, *args), **kwargs)
        finally:
            converting.reset(token)

    return from_pretrained


def _strictly(load: Callable[..., Any], *, output_loading_info: bool = False, **kwargs: Any) -> Any:
    """Load a model; strictly, if its configuration names a conversion.

    Raises:
        InputError: weights of a converted model are missing or unexpected.
    """
    model, info = load(output_loading_info=True, **kwargs)
    if config_record.names(model):
        _check_keys(type(model).__name__, info)
    return (model, info) if output_loading_info else model


def _check_keys(name: str, info: dict[str, Any]) -> None:
    missing, unexpected = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    if not missing and not unexpected:
        return
    reasons = [
        f"{counted(len(keys), 'weight')} {'is' if len(keys) == 1 else 'are'} {what} "
        f"({', '.join(keys[:4])}{', ...' if len(keys) > 4 else ''})"
        for keys, what in ((missing, "missing"), (unexpected, "unexpected"))
        if keys
    ]
    raise InputError(
        f"The weights do not match the {name} that the configuration names: {' and '.join(reasons)}. Load it with the "
        "class and the configuration with which it was saved."
    )


def _warn_missing(model: nn.Module) -> None:
    """Warn if a model was built without the conversion that its configuration names."""
    lost = [config_record.shown(entry) for _, entry in config_record.missing(model)]
    if lost:
        warnings.warn(
            f"The configuration names {' and '.join(lost)} of vispe, but {type(model).__name__} was loaded without, so "
            "its outputs are not those of the saved model. Load it with vispe.from_pretrained.",
            UserWarning,
            stacklevel=3,
        )
