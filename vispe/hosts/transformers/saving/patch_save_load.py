"""Saving and loading of transformers' models, once vispe is imported: what is converted is never lost without a word.

`PreTrainedModel.save_pretrained` and `from_pretrained` are wrapped in place, when transformers'
base class is imported (`vispe.hosts.import_hooks`); what they do to other models stays as it is. What knows the models is
therefore imported when one is saved or loaded.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any

from torch import nn

from vispe.errors import InputError
from vispe.hosts.monkeypatch import Door
from vispe.hosts.transformers.saving import config_record
from vispe.hosts.transformers.subclasses import Named, complete_with, converting, positioned, stock_of


def install() -> None:
    """Wrap the two methods; once is enough, more often does no harm."""
    complete_with(_complete)
    for door in _doors():
        door.install()


def uninstall() -> None:
    """Take the wrappers away again."""
    for door in _doors():
        door.uninstall()


def _doors() -> tuple[Door, ...]:
    """Return what is wrapped in the class that all models derive from; to import it installs the wrappers, too."""
    base = importlib.import_module("transformers.modeling_utils").PreTrainedModel
    return Door(base, "from_pretrained", _loading), Door(base, "save_pretrained", _saving)


def _complete(model: nn.Module, asked: type) -> None:
    """Convert a model that was built by calling the class of a converted one, where its configuration says how."""
    from vispe.hosts.transformers.convert import complete

    complete(model, asked)


def _saving(original: Callable[..., None]) -> Callable[..., None]:
    def save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        with config_record.exact(self) as configs:
            # towers of timm are not warned about: transformers builds them by `model_args`
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
            _tell(loaded[0] if isinstance(loaded, tuple) else loaded)
            return loaded
        built = positioned(stock_of(cls) or cls, Named) if converting.get() else cls
        # towers that a constructor loads by itself are loaded as they are
        token = converting.set(False)
        try:
            return _strictly(functools.partial(original, built, *args), **kwargs)
        finally:
            converting.reset(token)

    return from_pretrained


def _strictly(load: Callable[..., Any], *, output_loading_info: bool = False, **kwargs: Any) -> Any:
    """Return a model that was converted, if it was, before it had weights.

    Raises:
        InputError: it was converted, and weights of it are missing, or there are others.
    """
    model, info = load(output_loading_info=True, **kwargs)
    if config_record.names(model):
        _check_keys(type(model).__name__, info)
    return (model, info) if output_loading_info else model


def _check_keys(name: str, info: dict[str, Any]) -> None:
    missing, others = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    if not missing and not others:
        return
    reasons = [
        f"{len(keys)} weights {what} ({', '.join(keys[:4])}{', ...' if len(keys) > 4 else ''})"
        for keys, what in ((missing, "of the model are missing"), (others, "are not of this model"))
        if keys
    ]
    raise InputError(
        f"The {name} that the configuration names does not fit the weights beside it: {' and '.join(reasons)}. Load it "
        "with the class that it was saved from, and with the configuration that was saved with it."
    )


def _tell(model: nn.Module) -> None:
    """Warn, once, where a model was built without what its configuration names."""
    lost = [config_record.shown(entry) for _, entry in config_record.missing(model)]
    if lost:
        warnings.warn(
            f"The configuration names {' and '.join(lost)} of vispe, and {type(model).__name__} was loaded without, so "
            "its outputs are not those of the model that was saved; load it with vispe.from_pretrained.",
            UserWarning,
            stacklevel=3,
        )
