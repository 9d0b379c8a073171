"""Uniform access to vision models: blocks, patches, image size, feature maps and tokens; copies of models."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vispe.backbones.local.transformers_model import of_transformers, reinitialize
from vispe.errors import UnsupportedHost
from vispe.hosts.common.overlapping_patches import spacing_of


def image_tower(model: nn.Module) -> nn.Module:
    """Return the image tower of an open_clip model; any other model itself."""
    return getattr(model, "visual", model)


def final_tokens(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the final, normalised patch features (b, d, h, w) and class tokens (b, d), with gradients.

    The mode of the model, training or evaluation, is not changed. Class tokens are None for models without them.

    Args:
        model: model of timm, or an image tower of open_clip, converted or not.
        images: normalised, (b, 3, H, W), sides multiples of the patch size.

    Raises:
        UnsupportedHost: the model returns no feature maps.

    >>> import timm
    >>> maps, token = final_tokens(timm.create_model("test_vit"), torch.zeros(1, 3, 160, 160))
    >>> maps.shape, token.shape
    (torch.Size([1, 64, 10, 10]), torch.Size([1, 64]))
    """
    last = len(blocks_of(model)) - 1
    final = intermediates(model, images, [last], norm=True, prefix=True)[0]
    if isinstance(final, Tensor):
        return final, None
    maps, prefix = final
    return maps, prefix[:, 0] if has_class_token(model) else None


def intermediates(
    model: nn.Module, images: Tensor, indices: int | list[int], *, norm: bool, prefix: bool = False
) -> list[Any]:
    """Return the maps (b, d, h, w) after some blocks.

    Args:
        model: model of timm, or an image tower of open_clip.
        images: normalised, (b, 3, H, W).
        indices: indices of the blocks, or an integer for this number of last blocks.
        norm: apply the final norm to each map.
        prefix: return pairs of a map and the prefix tokens, for models with prefix tokens.
    """
    options: dict[str, Any] = {"indices": indices, "output_fmt": "NCHW", "intermediates_only": True}
    if not _of_open_clip(model):
        options |= {"return_prefix_tokens": True} if prefix else {}
        return list(model.forward_intermediates(images, norm=norm, **options))
    # open_clip has other names for these arguments
    options |= {"normalize_intermediates": norm, "output_extra_tokens": prefix}
    output = model.forward_intermediates(images, **options)
    maps = output["image_intermediates"]
    return list(zip(maps, output["image_intermediates_prefix"], strict=True)) if prefix else list(maps)


def has_class_token(model: nn.Module) -> bool:
    """Return whether a vision transformer has a class token."""
    return any(getattr(model, name, None) is not None for name in ("cls_token", "class_embedding"))


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """Return the blocks of a vision transformer.

    Raises:
        UnsupportedHost: the model has no blocks, or returns no feature maps.
    """
    blocks = getattr(model, "blocks", None)
    if blocks is None:
        blocks = getattr(getattr(model, "transformer", None), "resblocks", None)
    if blocks is None or not hasattr(model, "forward_intermediates"):
        raise UnsupportedHost(
            f"The model must have blocks and forward_intermediates, got {type(model).__name__}. Use a vision "
            "transformer of timm or open_clip."
        )
    return blocks


def patch_projection(model: nn.Module, *, overlapping: bool = False) -> nn.Conv2d | None:
    """Return the convolution that embeds the patches of a transformer, or None.

    The convolution is the first layer, `patch_embed.proj` (timm) or `conv1` (open_clip), and its stride
    equals its kernel size; with `overlapping`, a stride reduced by `vispe.backbones.overlap` is accepted too.

    >>> import timm
    >>> patch_projection(timm.create_model("test_vit"))
    Conv2d(3, 64, kernel_size=(16, 16), stride=(16, 16))
    """
    conv = model.conv1 if _of_open_clip(model) else getattr(getattr(model, "patch_embed", None), "proj", None)
    if not isinstance(conv, nn.Conv2d) or conv.padding not in (0, (0, 0), "valid"):
        return None
    if conv.kernel_size != conv.stride and not (overlapping and spacing_of(conv)):
        return None
    first = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)
    return conv if conv is first or first is None else None


def image_size(model: nn.Module) -> tuple[int, int]:
    """Return height and width in pixels of the images of a model.

    Args:
        model: a timm model, or the image tower of an open_clip model.
    """
    if hasattr(model, "image_mean") or _of_open_clip(model):
        size = model.image_size
    else:
        size = getattr(getattr(model, "patch_embed", None), "img_size", None)
        size = size or _data_config(model)["input_size"][1:]
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def input_settings(model: nn.Module) -> tuple[int, Tensor, Tensor]:
    """Return the image height in pixels, mean and standard deviation (3, 1, 1) that a model expects.

    Args:
        model: a timm model, or the image tower of an open_clip model.
    """
    if hasattr(model, "image_mean"):
        values = (model.image_mean, model.image_std)
    else:
        values = tuple(_data_config(model)[key] for key in ("mean", "std"))
    mean, std = (torch.tensor(value, device="cpu")[:, None, None] for value in values)
    return image_size(model)[0], mean, std


def _of_open_clip(model: nn.Module) -> bool:
    return hasattr(model, "conv1") and hasattr(model, "transformer")


def _data_config(model: nn.Module) -> dict[str, Any]:
    from timm.data import resolve_model_data_config

    return resolve_model_data_config(model)


def reinitialized_copy(model: nn.Module, seed: int = 0) -> tuple[nn.Module, Sequence[str]]:
    """Return a reinitialised copy of a model, the control for effects of training.

    Untrained transformers are not invariant either. Every module is reinitialised by its own `reset_parameters`, then
    a timm model by its `init_weights`; embeddings and tokens that the model itself owns are drawn from
    normal(0, 0.02), as in timm.

    Args:
        model: the model; not changed.
        seed: random seed.

    Returns:
        The copy, in evaluation mode, and the names of the parameters that were not reinitialised.

    Example:
        >>> import timm
        >>> model = timm.create_model("test_vit")
        >>> copied, unchanged = reinitialized_copy(model, seed=1)
        >>> torch.equal(copied.head.weight, model.head.weight), unchanged
        (False, ())
    """
    clone = copy.deepcopy(model)
    original = {name: p.detach().clone() for name, p in clone.named_parameters()}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for module in clone.modules():
            if callable(getattr(module, "reset_parameters", None)):
                module.reset_parameters()
        if of_transformers(clone):
            reinitialize(clone)
        elif callable(getattr(clone, "init_weights", None)):
            clone.init_weights()
        for name, p in clone.named_parameters():
            tables = ("pos_embed", "_token", "positional_embedding", "class_embedding")
            is_table = name.rpartition(".")[2].endswith(tables)
            if is_table and torch.equal(p, original[name]):
                torch.nn.init.trunc_normal_(p, std=0.02)
    # parameters that every initialisation sets to the same constant count as reinitialised
    unchanged = [
        name for name, p in clone.named_parameters() if torch.equal(p, original[name]) and not _constant(p)
    ]
    return clone.eval(), tuple(unchanged)


def _constant(p: Tensor) -> bool:
    """Return whether a parameter is all zeros or all ones, the usual constant initialisations."""
    return bool((p == 0).all()) or bool((p == 1).all())


def copy_with_shared_weights(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose modules can be changed; parameters and buffers are those of the model."""
    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def fingerprint(model: nn.Module) -> str:
    """Return the SHA-256 of all weights of a model."""
    digest = hashlib.sha256()
    for key, value in sorted(model.state_dict().items()):
        digest.update(key.encode())
        # bytes of the tensor, for any dtype
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
