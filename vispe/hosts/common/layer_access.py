"""Access to layers: in wrappers (LoRA, checkpointing, FSDP, compiled blocks), of foreign classes, by block index."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from vispe.errors import InputError, OptionError, UnsupportedHost, counted

# names under which wrappers register the wrapped module; those of the second group are absent from state dicts
_NAMED = ("base_layer", "_orig_mod", "module")
_UNNAMED = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def layer_in(path: str, module: nn.Module) -> tuple[str, nn.Module]:
    """Return path and module of the layer inside wrappers; the module itself without wrappers.

    The path is the one in state dicts. Submodules are read from `_modules`, as iterating over the children of a LoRA
    layer has side effects.
    """
    if "vispe_layer" in vars(module):
        return path, module
    for name in (*_NAMED, *_UNNAMED):
        if (inner := module._modules.get(name)) is not None:
            return layer_in(path if name in _UNNAMED else f"{path}.{name}", inner)
    return path, module


def block_in(path: str, module: nn.Module, known: tuple[type[nn.Module], ...]) -> tuple[str, nn.Module]:
    """Return path and module of the block of a `known` class at or below a module; the module itself if none is."""
    path, module = layer_in(path, module)
    for name, inner in () if isinstance(module, known) else module._modules.items():
        if isinstance(inner, known):
            return f"{path}.{name}", inner
    return path, module


def converted_in(path: str, module: nn.Module) -> tuple[str, nn.Module]:
    """Return path and module of the converted layer at or below a module; the module itself if there is none."""
    path, module = layer_in(path, module)
    if "vispe_layer" in vars(module):
        return path, module
    for name, inner in module._modules.items():
        below = (path, module) if inner is None else converted_in(f"{path}.{name}", inner)
        if "vispe_layer" in vars(below[1]):
            return below
    return path, module


def plain_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the original class of a dynamic subclass created by torch for parametrized or sharded modules."""
    while cls.__module__ == "torch.nn.utils.parametrize" or "FSDPModule" in {
        c.__name__ for c in cls.__bases__
    }:
        cls = cls.__bases__[-1]
    return cls


def state_path(path: str) -> str:
    """Return the path of a module in state dicts."""
    return ".".join(part for part in path.split(".") if part not in _UNNAMED)


def is_plain_linear(module: nn.Module) -> bool:
    """Return whether a layer only multiplies by its weight, so that nothing is lost if the weight is read instead.

    Adapters (LoRA), quantisation, hooks and patched methods act when the layer is called.
    """
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    return type(module) is nn.Linear and not any(hooks) and "forward" not in vars(module)


def refuse_parametrized(path: str, module: nn.Module) -> None:
    """Raise `UnsupportedHost` if a change of class would drop the parametrization of a weight."""
    if type(module) is not plain_class(type(module)):
        raise UnsupportedHost(
            f"{path}: its class cannot be changed, got {type(module).__name__} with parametrized "
            f"{', '.join(_parametrized(module))}. Call torch.nn.utils.parametrize.remove_parametrizations first, and "
            "parametrize it again afterwards."
        )


def _parametrized(module: nn.Module) -> list[str]:
    return list(getattr(module, "parametrizations", {})) or ["weights"]


def check_layers(
    layers: Iterable[tuple[int, str, nn.Module]], swapped: type[nn.Module] | tuple[type[nn.Module], ...]
) -> None:
    """Raise `UnsupportedHost` if a layer of a converted model no longer has a class of vispe."""
    for _, path, layer in layers:
        if not isinstance(layer, swapped):
            raise UnsupportedHost(
                f"{path}: its class was replaced after vispe.convert, which drops the encoding, got "
                f"{type(layer).__name__}. Use an additive encoding such as sincos2d, or do not patch the layer."
            )


def check_self_attention(
    layer: int, tokens: tuple[Tensor, Tensor, Tensor], key_padding_mask: Tensor | None
) -> None:
    """Raise `InputError` if torch's attention of block `layer` gets different queries, keys and values, or padding."""
    query, key, value = tokens
    others = {
        "other keys": key is not query,
        "other values": value is not query,
        "a key_padding_mask": key_padding_mask is not None,
    }
    if any(others.values()):
        listed = " and ".join(name for name, present in others.items() if present)
        raise InputError(
            f"Attention of block {layer}: an encoding needs self-attention without a key_padding_mask, got {listed}. "
            "Pass the tokens three times, and a mask as attn_mask."
        )


def feature_blocks(depth: int, indices: int | list[int] | None, host: str = "model") -> tuple[set[int], int]:
    """Return the indices of the blocks whose features are returned, and the last of them.

    Args:
        depth: number of blocks of the model.
        indices: block indices, negative ones from the end; an integer for the last blocks; None for all.
        host: noun for the host in messages: 'model' or 'tower'.

    Raises:
        OptionError: a block does not exist, or `indices` is empty.
    """
    if indices is None or isinstance(indices, int):
        count = depth if indices is None else indices
        take = list(range(depth - count, depth))
    else:
        take = [i + depth if i < 0 else i for i in indices]
    if not take or min(take) < 0 or max(take) >= depth:
        raise OptionError(
            f"indices must select some of the {counted(depth, 'block')} of the {host}, got {indices}."
        )
    return set(take), max(take)
