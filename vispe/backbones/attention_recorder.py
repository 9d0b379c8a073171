"""What attention does in every layer of a model, seen while an image passes, without changing the model.

A pre-hook on each attention layer hands its arguments to the code with which vispe runs that kind of layer, which
gives queries, keys, bias and rotation as one `Call`; maps are computed from it as the reference backend does. The
layer itself then runs as ever, so outputs are bit-identical, and the hooks are gone afterwards.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from timm.layers import DiffAttention
from timm.models.vision_transformer import DiffParallelScalingBlock
from torch import Tensor, nn

from vispe.attention.call import Call, combine
from vispe.attention.precision import no_autocast
from vispe.attention.transform.pairs import PairRotation
from vispe.backbones.local import transformers_attention
from vispe.backbones.local.transformers_model import TransformersModel, of_transformers, run
from vispe.encodings.attention_layer import Attention
from vispe.encodings.compose import bias_of, transform_of
from vispe.encodings.parts.preparation import prepare
from vispe.errors import OptionError, ShapeError, UnsupportedHost
from vispe.grid import Grid, Positions, as_positions
from vispe.hosts.common.context import Context
from vispe.hosts.timm import attention as timm_attention

T = TypeVar("T")

_STOCK = {ours: stock for stock, ours in timm_attention.SWAPS.items()}


@dataclass(frozen=True, eq=False)
class Seen:
    """One layer in one forward pass.

    Attributes:
        layer: its number, from 0.
        path: its name in the model.
        call: queries and keys (b, h, n, d_h) as they enter vispe's attention, and what is done to them. A rotary
            embedding of the host itself has been applied already.
        x: input of the layer (b, n, d).
        grid: the tokens: prefix, then the patches row-major; a text is one row (1, n).
        turned: by how much a rotary embedding of the host itself has turned the patches, if it has one.
    """

    layer: int
    path: str
    call: Call
    x: Tensor
    grid: Grid
    turned: PairRotation | None = None
    _known: dict[str, Any] = field(default_factory=dict, repr=False)

    def remember(self, name: str, make: Callable[[], T]) -> T:
        """Return what was made of this layer under a name, made at the first call."""
        if name not in self._known:
            self._known[name] = make()
        return self._known[name]


def attention_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (path, module) of every self-attention layer of a ViT, in order.

    Args:
        model: a timm model, an open_clip model or its image tower, a model of transformers, or one with
            `vispe.Attention` layers, with or without an encoding of vispe.

    Raises:
        UnsupportedHost: there are no such layers, or one is of a kind whose maps cannot be read.
    """
    layers = [(path, module) for path, module in model.named_modules() if isinstance(module, Attention)]
    tower, start = _tower(model)
    if not layers and hasattr(tower, "blocks"):
        layers = [(f"{start}{path}", module) for _, path, module in timm_attention.attentions(tower)]
    elif not layers and hasattr(getattr(tower, "transformer", None), "resblocks"):
        from vispe.hosts.open_clip.attention import attentions

        layers = [(f"{start}{path}", module) for _, path, module in attentions(tower)]
    elif not layers and of_transformers(tower):
        return [(f"{start}{path}", module) for path, module in transformers_attention.attentions(tower)]
    for path, module in layers:
        if reason := _unreadable(module):
            raise UnsupportedHost(f"The attention of {path} cannot be read: {reason}.")
    if not layers:
        raise UnsupportedHost(
            f"{type(model).__name__} has no attention layers that can be read; use a ViT of timm or open_clip, or "
            "vispe.Attention in your own."
        )
    return layers


@torch.no_grad()
def watch(
    model: nn.Module,
    images: Tensor,
    on_layer: Callable[[Seen], None],
    go: Callable[[], object] | None = None,
) -> None:
    """Run a model on images and call `on_layer` for every attention layer in turn, while it runs.

    Args:
        model: of timm, open_clip or transformers, or with `vispe.Attention` layers; in evaluation mode.
        images: (b, 3, H, W) on the model's device; for language models of transformers ids of tokens (b, n).
        on_layer: called with each layer; it should keep sums, not maps.
        go: runs the model on these images, for callers who want its output too.

    Raises:
        OptionError: the model is in training mode.
        UnsupportedHost: there are no attention layers, or one whose maps cannot be read.
        ShapeError: the tokens are not the patches of the image behind prefix tokens.

    >>> import timm
    >>> def show(seen: Seen) -> None:
    ...     print(seen.path, tuple(attention_map(seen.call)[1].shape))
    >>> watch(timm.create_model("test_vit", depth=1).eval(), torch.zeros(1, 3, 160, 160), show)
    blocks.0.attn (1, 2, 101, 101)
    """
    if model.training:
        raise OptionError(
            "The model is in training mode, where its attention is random; call model.eval() first."
        )
    layers = attention_layers(model)
    tower, _ = _tower(model)
    size = tuple(images.shape[-2:])
    with ExitStack() as handles:
        if of_transformers(tower):
            numbers = {module: (number, path) for number, (path, module) in enumerate(layers)}

            def found(module: nn.Module, call: Call, x: Tensor) -> None:
                grid = _grid(tower, size, x.shape[1]) if images.ndim == 4 else Grid((1, x.shape[1]))
                on_layer(_seen(*numbers[module], call, x, grid))

            handles.enter_context(transformers_attention.reading(list(numbers), found))
        for number, (path, module) in enumerate(layers):
            hook = _hook(tower, size, number, path, on_layer)
            handles.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        if go is not None:
            go()
        elif of_transformers(tower):
            run(tower, images)
        else:
            getattr(tower, "forward_features", tower)(images)


def attention_map(call: Call, heads: slice = slice(None)) -> tuple[Tensor, Tensor]:
    """Return logits and attention (b, h, n, m) of some heads of a call, float32 or better.

    Logits include bias and masks; the attention of fully masked rows is 0.
    """
    with no_autocast(call.q.device):
        logits, dead = logits_of(call, heads)
        attn = logits.softmax(-1)
        return logits, attn if dead is None else attn.masked_fill(dead, 0.0)


def logits_of(call: Call, heads: slice = slice(None)) -> tuple[Tensor, Tensor | None]:
    """Return the logits of `attention_map` without their attention, and which rows are fully masked, if any can be."""
    with no_autocast(call.q.device):
        q, k, _ = call.transformed()
        wide = torch.promote_types(q.dtype, torch.float32)
        logits = (q[:, heads].to(wide) * call.factor) @ k[:, heads].to(wide).transpose(-1, -2)
        parts = (call.added(), call.allowed())
        added, keep = (p if p is None or p.shape[1] == 1 else p[:, heads] for p in parts)
        mask, dead = combine(call.dense_bias(heads), added, keep, call.finite)
        return logits if mask is None else logits + mask, dead


def prefix_names(model: nn.Module, prefix: int) -> tuple[str, ...]:
    """Return what the tokens in front of the patches are: class, distillation, register 1, register 2, ..."""
    tower, _ = _tower(model)
    # NaFlex keeps its tokens in `embeds`
    holder = getattr(tower, "embeds", tower)
    first = ("cls_token", "class"), ("class_embedding", "class"), ("dist_token", "distillation")
    names = [word for name, word in first if getattr(holder, name, None) is not None][:prefix]
    kind = "register" if getattr(holder, "reg_token", None) is not None else "prefix"
    return (*names, *(f"{kind} {i + 1}" for i in range(prefix - len(names))))


class _Watch(Context):
    """A context in which attention is described and not computed."""

    __slots__ = ("seen",)

    def __init__(self, given: Any) -> None:
        if isinstance(given, Context):
            own = (given.positions, given.encodings, given.mask, given.is_causal, given.rope, given.mixed)
        else:
            own = (None, (), given, False)
        super().__init__(*own)
        self.seen: list[tuple[Call, Tensor]] = []

    def idle(self, module: nn.Module) -> bool:
        """Return False: layers without an encoding are described too."""
        del module
        return False

    def plain_mask(self, module: nn.Module, x: Tensor) -> None:
        """Return None: every layer goes through `attend`."""
        del module, x

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, x: Tensor, dropout_p: float
    ) -> Tensor:
        """Keep the call; what is returned goes nowhere."""
        del dropout_p
        own = getattr(module, "pos_enc", None)
        encodings = self.encodings if own is None else (*self.encodings, *own.parts())
        layer, masks = (
            getattr(module, "vispe_layer", 0),
            {"attn_mask": self.mask, "is_causal": self.is_causal},
        )
        self.seen.append((_described(q, k, v, encodings, self.positions, layer, x, **masks), x))
        return v


def _described(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    encodings: Any,
    pos: Positions | None,
    layer: int,
    x: Tensor,
    **masks: Any,
) -> Call:
    """Return the call with what the encodings of a layer do to it."""
    if not encodings:
        return Call(q, k, v, **masks)
    return Call(q, k, v, bias_of(encodings, pos, layer, x), transform_of(encodings, pos, layer, x), **masks)


def _hook(
    tower: nn.Module, size: tuple[int, ...], number: int, path: str, on_layer: Callable[[Seen], None]
) -> Callable[..., None]:
    def describe(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        turned = None
        if isinstance(module, Attention):
            call, x, pos = _own_call(module, *args, **kwargs)
        elif of_transformers(tower):
            if kwargs.get("vispe_context") is None:
                return  # read as it passes transformers' interface
            watcher = _Watch(kwargs["vispe_context"])
            module.forward(*args, **{**kwargs, "vispe_context": watcher})
            ((call, x),), pos = watcher.seen, watcher.positions
        else:
            swapped = _swap(_stock(module))
            assert swapped is not None
            bound = inspect.signature(swapped.forward).bind(module, *args, **kwargs)
            watcher = _Watch(bound.arguments.get("attn_mask"))
            if bound.arguments.get("is_causal"):
                watcher.is_causal = True
            # the mask is the argument through which vispe's layers get their context
            if hasattr(swapped, "vispe_attend"):  # stock layers have none of their own
                swapped.vispe_attend(module, bound.arguments["x"], watcher)
            else:
                bound.arguments["attn_mask"] = watcher
                swapped.forward(*bound.args, **bound.kwargs)
            ((call, x),), pos = watcher.seen, watcher.positions
            turned = _turned(bound.arguments.get("rope"), bool(getattr(module, "rotate_half", False)))
        grid = pos.grid if pos is not None and pos.grid is not None else _grid(tower, size, x.shape[1])
        on_layer(_seen(number, path, call, x, grid, turned))

    return describe


def _seen(
    number: int, path: str, call: Call, x: Tensor, grid: Grid, turned: PairRotation | None = None
) -> Seen:
    if grid.axes != 2 or grid.tokens != x.shape[1]:
        raise ShapeError(
            f"{path} has {x.shape[1]} tokens, which are not a grid of {grid.shape} patches behind {grid.prefix} "
            "prefix tokens; give whole images, without dropped patches."
        )
    return Seen(number, path, call, x, grid, turned)


def _turned(rope: Tensor | None, half: bool) -> PairRotation | None:
    """Return timm's tables of a rotation (..., n, 2 d_h), sines before cosines, as ours."""
    if rope is None:
        return None
    sin, cos = (t[..., : t.shape[-1] // 2] if half else t[..., ::2] for t in rope.float().chunk(2, -1))
    sin, cos = (t.reshape((1,) * (4 - t.ndim) + tuple(t.shape)) for t in (sin, cos))
    return PairRotation(cos, sin, "half" if half else "interleaved")


def _own_call(
    module: Attention,
    x: Tensor,
    where: Any,
    *,
    attn_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
) -> tuple[Call, Tensor, Positions]:
    """Return the call of a `vispe.Attention`: its own forward pass, with `attend` describing instead of computing."""
    pos = as_positions(where, x)
    encodings = () if module.pos_enc is None else module.pos_enc.parts()
    pos = prepare(encodings, pos, batch=x.shape[0])
    if module.qkv is not None:
        parts = module.qkv(x).chunk(3, -1)
    else:
        parts = (module.q_proj(x), module.k_proj(x), module.v_proj(x))
    q, k, v = (t.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for t in parts)
    q, k = module.q_norm(q), module.k_norm(k)
    masks = {"attn_mask": attn_mask, "key_padding_mask": key_padding_mask}
    return _described(q, k, v, encodings, pos, module.layer, x, **masks), x, pos


def _tower(model: nn.Module) -> tuple[nn.Module, str]:
    """Return the part of a model that sees images, and the path to it."""
    tower, path = model, ""
    if isinstance(model, TransformersModel):
        return model.net, "net."
    for name in ("visual", "trunk"):
        if isinstance(getattr(tower, name, None), nn.Module):
            tower, path = getattr(tower, name), f"{path}{name}."
    return tower, path


def _grid(tower: nn.Module, size: tuple[int, ...], tokens: int) -> Grid:
    """Return the grid of a model without positions of vispe."""
    embed = getattr(tower, "patch_embed", getattr(tower, "embeds", None))
    patch = getattr(embed, "patch_size", getattr(tower, "patch_size", None))
    if patch is None and of_transformers(tower):
        patch = getattr(tower.config, "patch_size", None)
    if patch is None:
        raise UnsupportedHost(f"{type(tower).__name__} does not say how large its patches are.")
    h, w = patch if isinstance(patch, tuple | list) else (patch, patch)
    # a patch at the border may be padded
    shape = (-(-size[0] // h), -(-size[1] // w))
    return Grid(shape, prefix=max(0, tokens - shape[0] * shape[1]))


def _stock(module: nn.Module) -> type[nn.Module]:
    """Return the class that an attention layer has in its own library, whether it is swapped or not."""
    kind = type(module)
    if kind in _STOCK or kind in timm_attention.SWAPS:
        return _STOCK.get(kind, kind)
    # open_clip takes a second to import, and models of timm do without
    from vispe.hosts.open_clip.attention import stock_type

    return stock_type(module)


def _swap(kind: type[nn.Module]) -> type[nn.Module] | None:
    """Return vispe's class for an attention layer, None where there is none."""
    if kind in timm_attention.SWAPS:
        return timm_attention.SWAPS[kind]
    from vispe.hosts.open_clip.attention import SWAPS

    return SWAPS.get(kind)


def _unreadable(module: nn.Module) -> str | None:
    """Return why the maps of an attention layer cannot be read, or None."""
    if isinstance(module, Attention):
        return None
    kind = _stock(module)
    if _swap(kind) is None:
        return f"{type(module).__name__} is not an attention layer that vispe knows"
    if kind in (DiffAttention, DiffParallelScalingBlock):
        return f"{kind.__name__} subtracts two maps per head"
    if getattr(module, "scaled_cosine", False):
        return "it compares queries and keys by their cosine"
    if isinstance(module, nn.MultiheadAttention) and not module.batch_first:
        return "it takes tokens before samples; build it with batch_first=True"
    return None
