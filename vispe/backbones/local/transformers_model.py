"""Image towers of transformers models with the interface of timm's vision models."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from vispe.errors import UnsupportedHost

_TOWERS = ("vision_tower", "vision_model", "visual")
_BLOCKS = ("layers", "layer", "encoder.layers", "encoder.layer", "model.layer", "model.layers")


def of_transformers(model: object) -> bool:
    """Return whether a model is from transformers, without importing transformers."""
    return any(
        (c.__module__, c.__name__) == ("transformers.modeling_utils", "PreTrainedModel")
        for c in type(model).__mro__
    )


def is_language_model(model: object) -> bool:
    """Return whether a model is a causal language model of transformers, with token ids as input."""
    if not of_transformers(model):
        return False
    try:
        embedding = model.get_input_embeddings()
    except NotImplementedError:
        # vision models without `embeddings.patch_embeddings` in the layout of transformers
        return False
    if not isinstance(embedding, nn.Embedding):
        return False
    causal = [m.is_causal for m in model.modules() if isinstance(getattr(m, "is_causal", None), bool)]
    towers = [
        part for part in (model, getattr(model, "model", None)) for key in _TOWERS if hasattr(part, key)
    ]
    return bool(causal) and all(causal) and not towers


def reinitialize(net: nn.Module) -> None:
    """Reinitialise all weights of a model of transformers, as for a new model."""
    # loaded weights are marked, and marked weights would not be initialised
    for part in (*net.modules(), *net.parameters(), *net.buffers()):
        if hasattr(part, "_is_hf_initialized"):
            del part._is_hf_initialized
    net.init_weights()


def run(net: nn.Module, inputs: Tensor) -> Any:
    """Run a model of transformers on images (b, 3, H, W), of any size if supported, or on token ids (b, n)."""
    known, options = inspect.signature(net.forward).parameters, {}
    size = getattr(net.config, "image_size", None)
    other = size is not None and tuple(inputs.shape[-2:]) != _pair(size)
    if inputs.ndim == 4 and other and "interpolate_pos_encoding" in known:
        options["interpolate_pos_encoding"] = True
    return net(inputs, **options)


class TransformersModel(nn.Module):
    """The image tower of a model of transformers, with `forward_intermediates` as in timm.

    Args:
        model: a vision model, such as ViT, DINOv2, CLIP or SigLIP; or a model that contains such a tower,
            such as LLaVA.
        mean: channel means of images in [0, 1].
        std: channel standard deviations.

    Raises:
        UnsupportedHost: the model has no tower whose tokens are the patches of an image in row-major order.
    """

    def __init__(self, model: nn.Module, mean: Any = (0.5,) * 3, std: Any = (0.5,) * 3) -> None:
        super().__init__()
        net, name = model, type(model).__name__
        for _ in range(3):
            inner = [
                getattr(part, key, None) for part in (net, getattr(net, "model", None)) for key in _TOWERS
            ]
            net = next((part for part in inner if isinstance(part, nn.Module)), net)
        # models with a head for images have their tower under another name
        net = net if any(_has(net, path) for path in _BLOCKS) else getattr(net, "base_model", net)
        blocks = [net.get_submodule(path) for path in _BLOCKS if _has(net, path)]
        convs = [m for m in net.modules() if isinstance(m, nn.Conv2d)]
        size = getattr(getattr(net, "config", None), "image_size", None)
        if not blocks or not convs or size is None or not of_transformers(net):
            raise UnsupportedHost(
                "The model must have an image tower with blocks, one convolution for patches and config.image_size, "
                f"got {name}. Use a vision model such as ViT, DINOv2, CLIP or SigLIP, or one with such a tower."
            )
        self.net, self.image_mean, self.image_std = net, mean, std
        self.image_size, self._path = _pair(size), next(path for path in _BLOCKS if _has(net, path))
        # some models accept any size by default, others with an argument that `run` sets
        self.any_size = any(
            hasattr(m, key) for m in net.modules() for key in ("interpolate_pos_encoding", "inv_freq")
        )
        # `train` would change the mode of the parts of the model, such as a frozen one
        self.training = net.training

    @property
    def blocks(self) -> nn.Module:
        """The blocks, first to last."""
        return self.net.get_submodule(self._path)

    @property
    def patch_embed(self) -> SimpleNamespace:
        """Namespace with the convolution of the patches as `proj`."""
        return SimpleNamespace(proj=next(m for m in self.net.modules() if isinstance(m, nn.Conv2d)))

    @property
    def cls_token(self) -> Tensor | None:
        """The class token."""
        names = ("cls_token", "class_embedding")
        tokens = (getattr(self.net.embeddings, name, None) for name in names)
        return next((token for token in tokens if token is not None), None)

    def init_weights(self) -> None:
        """Reinitialise all weights, as transformers does for a new model."""
        reinitialize(self.net)

    def forward(self, images: Tensor) -> Tensor:
        """Return the tokens (b, n, d) of images (b, 3, H, W), prefix tokens first."""
        return run(self.net, images).last_hidden_state

    def forward_intermediates(
        self, images: Tensor, indices: Any, norm: bool = False, return_prefix_tokens: bool = False, **_: Any
    ) -> list[Any]:
        """Return maps (b, d, h, w) after some blocks, optionally with prefix tokens (b, p, d).

        With `norm`, the map of the last block is `last_hidden_state`, and the final norm, if any, is applied
        to the maps of earlier blocks.

        Raises:
            UnsupportedHost: the outputs of the blocks are not the patch tokens.
        """
        outputs: list[Tensor] = []
        handles = [
            block.register_forward_hook(
                lambda m, a, out: outputs.append(out[0] if isinstance(out, tuple) else out)
            )
            for block in self.blocks
        ]
        try:
            final = self(images)
        finally:
            for handle in handles:
                handle.remove()
        count = len(outputs)
        selected = range(count - indices, count) if isinstance(indices, int) else indices
        last = self._last_norm(outputs[-1], final) if norm else None
        patch = self.patch_embed.proj.kernel_size
        h, w = images.shape[-2] // patch[0], images.shape[-1] // patch[1]
        results = []
        for i in selected:
            x = outputs[i]
            if norm:
                x = final if i == count - 1 else x if last is None else last(x)
            if x.ndim != 3 or x.shape[1] < h * w:
                raise UnsupportedHost(
                    f"The blocks of {type(self.net).__name__} must return tokens of {h} x {w} patches, got "
                    f"{tuple(x.shape)}."
                )
            prefix, tokens = x[:, : x.shape[1] - h * w], x[:, x.shape[1] - h * w :]
            maps = tokens.transpose(1, 2).unflatten(2, (h, w))
            results.append((maps, prefix) if return_prefix_tokens and prefix.shape[1] else maps)
        return results

    def _last_norm(self, x: Tensor, final: Tensor) -> nn.Module | None:
        """Return the norm between the last block and `last_hidden_state`; None if there is none."""
        for name in ("layernorm", "norm", "post_layernorm"):
            module = getattr(self.net, name, None)
            if isinstance(module, nn.Module) and torch.equal(module(x), final):
                return module
        return None


def _has(net: nn.Module, path: str) -> bool:
    for name in path.split("."):
        net = getattr(net, name, None)
    return isinstance(net, nn.ModuleList)


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
