"""Which attention path each layer of a model takes, found by running the model once and looking on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vispe.attention import explain
from vispe.encodings import attention_layer
from vispe.hosts.common.context import Context

STOCK = "the model's own attention"
OFF = "fused attention of this layer is switched off"


class Path(NamedTuple):
    """The path of one attention layer.

    Attributes:
        layer: name of the module.
        backend: a backend of `vispe.attention`, or the model's own attention.
        reason: why it is taken.
        refused: why each other backend is not.
    """

    layer: str
    backend: str
    reason: str
    refused: dict[str, str]


@torch.no_grad()
def attention_paths(model: nn.Module, *inputs: Any) -> list[Path]:
    """Return the path of every attention layer of a model, in order, for these inputs.

    Layers that vispe has not changed, because the encoding works outside of attention, are those of the model's own. A
    layer whose softmaxes take different paths has an entry for each.

    Example:
        >>> import timm, torch
        >>> model = timm.create_model('vit_tiny_patch16_224', img_size=32, depth=1, pos_embed='sincos2d')
        >>> attention_paths(model, torch.zeros(1, 3, 32, 32))[0].backend
        "the model's own attention"

    Args:
        model: a converted model of any host; its `forward` is called once.
        *inputs: what it is called with.
    """
    paths: dict[str, list[Path]] = {}
    names: list[str] = []  # the layer that runs

    def note(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Tensor:
        choice = explain(q, k, v, **arguments)
        off = arguments.get("backend") == "reference"  # what converted models ask for then
        reason = OFF if off else choice.reason
        path, seen = Path(names[-1], choice.backend, reason, choice.refused), paths[names[-1]]
        if seen[0].backend == STOCK:
            seen.clear()
        if path not in seen:
            seen.append(path)
        return attend(q, k, v, **arguments)

    def enter(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            names.append(name)
            handed = (*args, *kwargs.values())  # some hosts name even their tokens
            tokens = next(a for a in handed if isinstance(a, Tensor))
            given = [a for a in handed if isinstance(a, Context)]
            if given and not module.fused_attn:
                paths[name] = [Path(name, "reference", OFF, {})]
                return
            masked = bool(given) and given[0].plain_mask(module, tokens) is not None
            why = (
                "one fixed bias on a small grid, as a mask that is kept with its positions"
                if masked
                else "no encoding works inside of it"
            )
            paths[name] = [Path(name, STOCK, why, {})]

        return hook

    attend = attention_layer.attention
    watched = [(n, m) for n, m in model.named_modules() if _attends(m)]
    hooks = [m.register_forward_pre_hook(enter(n), with_kwargs=True) for n, m in watched]
    with _exchanged(note):
        try:
            model(*inputs)
        finally:
            for hook in hooks:
                hook.remove()
    return [path for taken in paths.values() for path in taken]


@contextmanager
def _exchanged(function: Any) -> Iterator[None]:
    """Let the layers call `function` for attention."""
    before = attention_layer.attention
    attention_layer.attention = function
    try:
        yield
    finally:
        attention_layer.attention = before


def _attends(module: nn.Module) -> bool:
    """Whether a module is an attention layer, of the host or of vispe."""
    if hasattr(module, "vispe_layer"):
        return True
    return "Attention" in type(module).__name__ and hasattr(module, "num_heads")
