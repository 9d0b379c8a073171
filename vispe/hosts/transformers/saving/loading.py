"""`from_pretrained` for converted models of transformers."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from vispe.errors import InputError, require
from vispe.hosts.transformers.version import check_version


def from_pretrained(auto_class: Any, path: str | os.PathLike[str], **kwargs: Any) -> Any:
    """Load a model that was saved with a position scheme or an encoding of vispe, with all of its weights.

    The model is converted before its weights are loaded, so `device_map`, `dtype` and other arguments of transformers
    apply to all weights. Loading is strict: missing or unexpected weights are an error.

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
        auto_class: the class that loads the stock model: `AutoModelForImageTextToText`, or the model class itself.
        path: the folder, or the name on the hub.
        **kwargs: arguments of its `from_pretrained`.

    Returns:
        the result of its `from_pretrained`: the model, or a tuple with loading information.

    Raises:
        InputError: the configuration names no conversion, or the weights do not match the model.
        MissingExtra: transformers is not installed, or its version is not supported.
    """
    require("transformers", "vlm", "vispe.from_pretrained")
    check_version()
    from vispe.hosts.transformers.saving import patch_save_load

    patch_save_load.install()
    load = getattr(auto_class, "from_pretrained", None)
    if load is None:
        raise InputError(
            f"vispe.from_pretrained: auto_class must be a class of transformers that loads models, got {auto_class!r}."
        )
    token = patch_save_load.converting.set(True)
    try:
        loaded = load(path, **kwargs)
    finally:
        patch_save_load.converting.reset(token)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    if not isinstance(model, nn.Module):
        raise InputError(
            f"vispe.from_pretrained: auto_class must be a class of transformers that loads models, got "
            f"{auto_class.__name__}, which returned a {type(model).__name__}."
        )
    return loaded
