"""The part of a transformers model that sees images, with the face that vision models of timm have."""

from __future__ import annotations

import inspect
import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from vispe.errors import InputError, UnsupportedHost, require

PREFIX = "hf:"
_PREPARING = ("preprocessor_config.json", "processor_config.json")
_TOWERS = ("vision_tower", "vision_model", "visual")
_BLOCKS = ("layers", "layer", "encoder.layers", "encoder.layer", "model.layer", "model.layers")


def of_transformers(model: object) -> bool:
    """Return whether a model is one of transformers, without importing it."""
    return any(
        (c.__module__, c.__name__) == ("transformers.modeling_utils", "PreTrainedModel")
        for c in type(model).__mro__
    )


def reads_words(model: object) -> bool:
    """Return whether a model is a causal language model of transformers, whose input are ids of tokens."""
    if not of_transformers(model) or not isinstance(model.get_input_embeddings(), nn.Embedding):
        return False
    causal = [m.is_causal for m in model.modules() if isinstance(getattr(m, "is_causal", None), bool)]
    towers = [
        part for part in (model, getattr(model, "model", None)) for key in _TOWERS if hasattr(part, key)
    ]
    return bool(causal) and all(causal) and not towers


def draw_again(net: nn.Module) -> None:
    """Draw all weights of a model of transformers, as it does for a new one."""
    # what was loaded is marked, and marked weights would stay
    for part in (*net.modules(), *net.parameters(), *net.buffers()):
        if hasattr(part, "_is_hf_initialized"):
            del part._is_hf_initialized
    net.init_weights()


def run(net: nn.Module, inputs: Tensor) -> Any:
    """Run a model of transformers on images (b, 3, H, W), of any size where it can, or on ids of tokens (b, n)."""
    known, options = inspect.signature(net.forward).parameters, {}
    size = getattr(net.config, "image_size", None)
    other = size is not None and tuple(inputs.shape[-2:]) != _pair(size)
    if inputs.ndim == 4 and other and "interpolate_pos_encoding" in known:
        options["interpolate_pos_encoding"] = True
    return net(inputs, **options)


class TransformersModel(nn.Module):
    """Images (b, 3, H, W) -> maps, by the image tower of a model of transformers.

    Args:
        model: a vision model, such as ViT, DINOv2, CLIP or SigLIP; or a model with such a tower, such as LLaVA.
        mean: of the channels of images in [0, 1].
        std: of the channels.

    Raises:
        UnsupportedHost: no tower whose tokens are the patches of an image, row by row.
    """

    def __init__(self, model: nn.Module, mean: Any = (0.5,) * 3, std: Any = (0.5,) * 3) -> None:
        super().__init__()
        net, name = model, type(model).__name__
        for _ in range(3):
            inner = [
                getattr(part, key, None) for part in (net, getattr(net, "model", None)) for key in _TOWERS
            ]
            net = next((part for part in inner if isinstance(part, nn.Module)), net)
        found = [net.get_submodule(path) for path in _BLOCKS if _has(net, path)]
        convs = [m for m in net.modules() if isinstance(m, nn.Conv2d)]
        size = getattr(getattr(net, "config", None), "image_size", None)
        if not found or not convs or size is None or not of_transformers(net):
            raise UnsupportedHost(
                f"{name} has no image tower with blocks, one convolution for patches and config.image_size; use a "
                "vision model such as ViT, DINOv2, CLIP or SigLIP, or one with such a tower."
            )
        self.net, self.image_mean, self.image_std = net, mean, std
        self.image_size, self._path = _pair(size), next(path for path in _BLOCKS if _has(net, path))
        # some take any size always, others when they are asked, in `run`
        self.any_size = any(
            hasattr(m, key) for m in net.modules() for key in ("interpolate_pos_encoding", "inv_freq")
        )
        self.train(net.training)

    @property
    def blocks(self) -> nn.Module:
        """The blocks, first to last."""
        return self.net.get_submodule(self._path)

    @property
    def patch_embed(self) -> SimpleNamespace:
        """Holds the convolution of the patches as `proj`."""
        return SimpleNamespace(proj=next(m for m in self.net.modules() if isinstance(m, nn.Conv2d)))

    @property
    def cls_token(self) -> Tensor | None:
        """The class token."""
        names = ("cls_token", "class_embedding")
        found = (getattr(self.net.embeddings, name, None) for name in names)
        return next((token for token in found if token is not None), None)

    def init_weights(self) -> None:
        """Draw all weights again, as transformers does for a new model."""
        draw_again(self.net)

    def forward(self, images: Tensor) -> Tensor:
        """Images (b, 3, H, W) -> tokens (b, n, d), prefix tokens first."""
        return run(self.net, images).last_hidden_state

    def forward_intermediates(
        self, images: Tensor, indices: Any, norm: bool = False, return_prefix_tokens: bool = False, **_: Any
    ) -> list[Any]:
        """Return maps (b, d, h, w) after some blocks, with prefix tokens (b, p, d) where asked.

        With `norm` the last one is `last_hidden_state`; earlier ones get the norm that makes it, if there is one.
        """
        seen: list[Tensor] = []
        handles = [
            block.register_forward_hook(
                lambda m, a, out: seen.append(out[0] if isinstance(out, tuple) else out)
            )
            for block in self.blocks
        ]
        try:
            final = self(images)
        finally:
            for handle in handles:
                handle.remove()
        count = len(seen)
        wanted = range(count - indices, count) if isinstance(indices, int) else indices
        last = self._last_norm(seen[-1], final) if norm else None
        patch = self.patch_embed.proj.kernel_size
        h, w = images.shape[-2] // patch[0], images.shape[-1] // patch[1]
        given = []
        for i in wanted:
            x = seen[i]
            if norm:
                x = final if i == count - 1 else x if last is None else last(x)
            if x.ndim != 3 or x.shape[1] < h * w:
                raise UnsupportedHost(
                    f"{type(self.net).__name__} gives {tuple(x.shape)} for {h} x {w} patches; they must be the tokens."
                )
            prefix, tokens = x[:, : x.shape[1] - h * w], x[:, x.shape[1] - h * w :]
            maps = tokens.transpose(1, 2).unflatten(2, (h, w))
            given.append((maps, prefix) if return_prefix_tokens and prefix.shape[1] else maps)
        return given

    def _last_norm(self, x: Tensor, final: Tensor) -> nn.Module | None:
        """Return the norm between the last block and `last_hidden_state`, None where there is none."""
        for name in ("layernorm", "norm", "post_layernorm"):
            module = getattr(self.net, name, None)
            if isinstance(module, nn.Module) and torch.equal(module(x), final):
                return module
        return None


def load_transformers(text: str) -> nn.Module:
    """Return a transformers model in evaluation mode, with its head where it is one for images and text.

    Args:
        text: `hf:FOLDER` or `hf:OWNER/NAME`.

    Raises:
        InputError: it cannot be loaded.
        MissingExtra: transformers is not installed.
    """
    require("transformers", "vlm", text)
    from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING as SPEAKING

    name = _place(text)
    try:
        # on a terminal transformers would ask whether to run the code of a repository
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        kind = AutoModelForImageTextToText if type(config) in SPEAKING else AutoModel
        return kind.from_pretrained(name, trust_remote_code=False).eval()
    except (OSError, ValueError, KeyError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise InputError(
            f"{text} cannot be loaded by transformers: {' '.join(str(error).split())[:300]}"
        ) from error


def processor_of(text: str) -> Any:
    """Return the processor of a transformers model, `hf:FOLDER` or `hf:OWNER/NAME`.

    Raises:
        UnsupportedHost: it has none that can be loaded.
    """
    from transformers import AutoProcessor

    try:
        return AutoProcessor.from_pretrained(text.removeprefix(PREFIX), trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        raise UnsupportedHost(
            f"the processor of {text} cannot be loaded: {' '.join(str(error).split())[:200]}"
        ) from error


def colours(text: str) -> tuple[Any, Any]:
    """Return the means and deviations with which a transformers model normalises the channels of images.

    Args:
        text: `hf:FOLDER` or `hf:OWNER/NAME`.

    Raises:
        InputError: no file says so.
        MissingExtra: transformers is not installed.
    """
    require("transformers", "vlm", text)
    name = _place(text)
    folder = Path(name)
    if not folder.is_dir():
        from transformers.utils.hub import cached_file

        quiet = {"_raise_exceptions_for_missing_entries": False}
        found = (cached_file(name, file, **quiet) for file in _PREPARING)
        folder = Path(next((path for path in found if path), "")).parent
    file = next((folder / name for name in _PREPARING if (folder / name).is_file()), None)
    if file is None:
        raise InputError(
            f"{text} has no {' or '.join(_PREPARING)}, which says how images are normalised; save its image processor "
            "into the folder."
        )
    known = json.loads(file.read_text(encoding="utf-8"))
    # processors of text and images keep the latter apart
    known = known.get("image_processor", known)
    if len(known.get("image_mean") or ()) != 3 or len(known.get("image_std") or ()) != 3:
        raise InputError(f"{file} has no image_mean and image_std of three channels; add them.")
    return known["image_mean"], known["image_std"]


def _place(text: str) -> str:
    """Return the folder or the name of a repository."""
    name = text.removeprefix(PREFIX)
    if not Path(name).is_dir() and name.startswith(("/", ".", "~")):
        raise InputError(f"{text} names the folder {name}, which does not exist; check the path.")
    return name


def _has(net: nn.Module, path: str) -> bool:
    for name in path.split("."):
        net = getattr(net, name, None)
    return isinstance(net, nn.ModuleList)


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
