"""`from_pretrained`: a model of transformers, with the scheme and the encoding that its configuration names."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from vispe.errors import InputError, require
from vispe.hosts.transformers.version import check_version


def from_pretrained(auto_class: Any, path: str | os.PathLike[str], **kwargs: Any) -> Any:
    """Return a model that was saved with a position scheme or an encoding of vispe, with all of its weights.

    The model is converted before it has weights, so transformers puts these where `device_map`, `dtype` and its other
    arguments say. Loading is strict: weights that are missing, or that the model does not have, are an error.

    Example:
        >>> import tempfile, warnings, vispe
        >>> from transformers import AutoModel, CLIPVisionConfig, CLIPVisionModel
        >>> config = CLIPVisionConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=32)
        >>> model = vispe.convert(CLIPVisionModel(config), 'alibi2d(slopes=learned)')
        >>> with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(action='ignore'):
        ...     model.save_pretrained(folder)
        ...     again = vispe.from_pretrained(CLIPVisionModel, folder)
        >>> again.vispe.spec
        [{'name': 'alibi2d', 'slopes': 'learned'}]

    Args:
        auto_class: what would load the stock model: `AutoModelForImageTextToText`, or the class itself.
        path: the folder, or the name on the hub.
        **kwargs: arguments of its `from_pretrained`.

    Raises:
        InputError: the configuration names nothing, or weights and model do not fit.
        MissingExtra: transformers is not installed, or it is too old.
    """
    require("transformers", "vlm", "vispe.from_pretrained")
    check_version()
    from vispe.hosts.transformers.saving import patch_save_load

    patch_save_load.install()
    load = getattr(auto_class, "from_pretrained", None)
    if load is None:
        raise InputError(
            f"vispe.from_pretrained needs a class of transformers that loads models, got {auto_class!r}."
        )
    token = patch_save_load.converting.set(True)
    try:
        loaded = load(path, **kwargs)
    finally:
        patch_save_load.converting.reset(token)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    if not isinstance(model, nn.Module):
        raise InputError(
            f"vispe.from_pretrained needs a class of transformers that loads models, and {auto_class.__name__} gave a "
            f"{type(model).__name__}."
        )
    return loaded
