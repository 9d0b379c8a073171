"""Models of transformers and their processors, from folders or the Hugging Face hub."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

from torch import nn

from vispe.backbones.hub import cached, check_download
from vispe.errors import InputError, UnsupportedHost, require, short

PREFIX = "hf:"
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


def load_transformers(text: str) -> nn.Module:
    """Return a transformers model in evaluation mode; models for images and text include their head.

    Args:
        text: `hf:FOLDER` or `hf:OWNER/NAME`.

    Raises:
        InputError: it cannot be loaded.
        MissingExtra: transformers is not installed.
    """
    require("transformers", "vlm", text)
    from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    name = _source(text)
    # a model file alone may not contact a server
    if not Path(name).is_dir() and cached(name, "config.json") is None:
        check_download(f"{text} is")
    try:
        # without trust_remote_code, transformers would prompt on a terminal
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        has_head = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        kind = AutoModelForImageTextToText if has_head else AutoModel
        return kind.from_pretrained(name, trust_remote_code=False).eval()
    except (OSError, ValueError, KeyError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise InputError(f"{text} cannot be loaded by transformers: {short(error)}") from error


def processor_of(text: str) -> Any:
    """Return the processor of a transformers model, `hf:FOLDER` or `hf:OWNER/NAME`.

    Raises:
        UnsupportedHost: there is no processor, or it cannot be loaded.
    """
    from transformers import AutoProcessor

    try:
        return AutoProcessor.from_pretrained(text.removeprefix(PREFIX), trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        raise UnsupportedHost(f"the processor of {text} cannot be loaded: {short(error)}") from error


def normalization_of(text: str) -> tuple[Any, Any]:
    """Return the channel means and standard deviations of the image processor of a transformers model.

    Args:
        text: `hf:FOLDER` or `hf:OWNER/NAME`.

    Raises:
        InputError: there is no configuration of an image processor, or it has no means and standard deviations.
        MissingExtra: transformers is not installed.
    """
    require("transformers", "vlm", text)
    name = _source(text)
    folder = Path(name)
    if not folder.is_dir():
        from transformers.utils.hub import cached_file

        quiet = {"_raise_exceptions_for_missing_entries": False}
        paths = (cached_file(name, file, **quiet) for file in _PROCESSOR_FILES)
        folder = Path(next((path for path in paths if path), "")).parent
    file = next((folder / name for name in _PROCESSOR_FILES if (folder / name).is_file()), None)
    if file is None:
        raise InputError(
            f"{text} needs {' or '.join(_PROCESSOR_FILES)} for the normalisation of images. Save its image processor "
            "into the folder."
        )
    config = json.loads(file.read_text(encoding="utf-8"))
    # processors of text and images nest the configuration of the image processor
    config = config.get("image_processor", config)
    if len(config.get("image_mean") or ()) != 3 or len(config.get("image_std") or ()) != 3:
        raise InputError(f"{file} must have image_mean and image_std of three channels. Add them.")
    return config["image_mean"], config["image_std"]


def _source(text: str) -> str:
    """Return the folder or the name of a repository."""
    name = text.removeprefix(PREFIX)
    if not Path(name).is_dir() and name.startswith(("/", ".", "~")):
        raise InputError(f"{text}: the folder {name} does not exist. Check the path.")
    return name
