"""Observation of the attention of every layer during a forward pass, without changing the model.

A pre-hook on each attention layer passes its arguments to vispe's implementation of that kind of layer, which returns
queries, keys, bias and rotation as one `Call`. Attention maps are computed from the `Call` as in the
reference backend. The layer itself then runs unchanged, so outputs are bit-identical. The hooks are removed
afterwards.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from timm.layers import DiffAttention
from timm.models.vision_transformer import DiffParallelScalingBlock
from torch import Tensor, nn

from vispe.attention.call import Call, combine_masks
from vispe.attention.precision import no_autocast
from vispe.attention.transform.pairs import PairRotation
from vispe.backbones.local import transformers_attention
from vispe.backbones.local.debiased import DebiasedModel
from vispe.backbones.local.transformers_model import TransformersModel, of_transformers, run
from vispe.encodings.attention_layer import Attention
from vispe.encodings.compose import bias_of, transform_of
from vispe.encodings.parts.preparation import prepare
from vispe.errors import OptionError, ShapeError, UnsupportedHost, counted
from vispe.grid import Grid, Positions, as_positions
from vispe.hosts.common.context import Context
from vispe.hosts.timm import attention as timm_attention

T = TypeVar("T")

_STOCK = {ours: stock for stock, ours in timm_attention.SWAPS.items()}


@dataclass(frozen=True, eq=False)
class LayerAttention:
    """Attention of one layer in one forward pass.

    Attributes:
        layer: index of the layer, from 0.
        path: name of the module.
        call: queries and keys (b, h, n, d_h) as passed to vispe's attention, with bias, rotation and masks.
            The model's own rotary embedding is already applied to them.
        x: input of the layer (b, n, d).
        grid: grid of the tokens: prefix tokens, then the patches in row-major order; text is a grid of one
            row, (1, n).
        rotation: rotation of the patches by the model's own rotary embedding; None if it has none.
    """

    layer: int
    path: str
    call: Call
    x: Tensor
    grid: Grid
    rotation: PairRotation | None = None
    _known: dict[str, Any] = field(default_factory=dict, repr=False)

    def remember(self, name: str, make: Callable[[], T]) -> T:
        """Return the cached result of `make` for this layer and name, computed in the first call."""
        if name not in self._known:
            self._known[name] = make()
        return self._known[name]


def attention_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (path, module) of every self-attention layer of a ViT, in order.

    Args:
        model: a timm model, an open_clip model or its image tower, a model of transformers, or one with
            `vispe.Attention` layers, with or without an encoding of vispe.

    Raises:
        UnsupportedHost: the model has no such layers, or the maps of one of them cannot be computed.
    """
    if isinstance(model, DebiasedModel) and not model.debiasing.average.is_identity:
        passes = counted(model.debiasing.average.passes, "forward pass")
        raise UnsupportedHost(
            f"The features are a mean over {passes}, so that an image has no single attention map."
        )
    layers = [(path, module) for path, module in model.named_modules() if isinstance(module, Attention)]
    tower, start = tower_of(model)
    if not layers and hasattr(tower, "blocks"):
        layers = [(f"{start}{path}", module) for _, path, module in timm_attention.attentions(tower)]
    elif not layers and hasattr(getattr(tower, "transformer", None), "resblocks"):
        from vispe.hosts.open_clip.attention import attentions

        layers = [(f"{start}{path}", module) for _, path, module in attentions(tower)]
    elif not layers and of_transformers(tower):
        return [(f"{start}{path}", module) for path, module in transformers_attention.attentions(tower)]
    for path, module in layers:
        if reason := _unreadable(module):
            raise UnsupportedHost(f"The attention maps of {path} cannot be computed: {reason}.")
    if not layers:
        raise UnsupportedHost(
            f"The model must have supported attention layers, got {type(model).__name__} without. Use a ViT of timm or "
            "open_clip, or vispe.Attention in your own model."
        )
    return layers


@torch.no_grad()
def record_attention(
    model: nn.Module,
    images: Tensor,
    on_layer: Callable[[LayerAttention], None],
    go: Callable[[], object] | None = None,
) -> None:
    """Run a model on images, and call `on_layer` for every attention layer during the forward pass.

    Args:
        model: model of timm, open_clip or transformers, or with `vispe.Attention` layers; in evaluation mode.
        images: (b, 3, H, W) on the model's device; for language models of transformers token ids (b, n).
        on_layer: called with each layer; it should accumulate statistics and not store maps.
        go: function that runs the model on these images, for callers that need its output.

    Raises:
        OptionError: the model is in training mode.
        UnsupportedHost: the model has no attention layers, or the maps of one of them cannot be computed.
        ShapeError: the tokens are not prefix tokens followed by the patches of the image.

    >>> import timm
    >>> def show(layer: LayerAttention) -> None:
    ...     print(layer.path, tuple(attention_map(layer.call)[1].shape))
    >>> record_attention(timm.create_model("test_vit", depth=1).eval(), torch.zeros(1, 3, 160, 160), show)
    blocks.0.attn (1, 2, 101, 101)
    """
    check_evaluation(model)
    tower, _ = tower_of(model)
    with reading_attention(model, images, on_layer):
        if go is not None:
            go()
        elif of_transformers(tower):
            run(tower, images)
        else:
            getattr(tower, "forward_features", tower)(images)


def check_evaluation(model: nn.Module) -> None:
    """Raise `OptionError` if a model is in training mode."""
    if model.training:
        raise OptionError(
            "The model must be in evaluation mode, as attention is random in training mode. Call model.eval() first."
        )


@contextmanager
def reading_attention(
    model: nn.Module, images: Tensor, on_layer: Callable[[LayerAttention], None], *, first: bool = False
) -> Iterator[None]:
    """Call `on_layer` for every attention layer of a forward pass that runs inside the context; without gradients.

    Args:
        model: model of timm, open_clip or transformers, or with `vispe.Attention` layers.
        images: (b, 3, H, W), of which only the size is used; for language models token ids (b, n).
        on_layer: called with each layer.
        first: observe the first sample of the batch only.

    Raises:
        UnsupportedHost: the model has no attention layers, or the maps of one of them cannot be computed.
        ShapeError: the tokens are not prefix tokens followed by the patches of the image.
    """
    layers = attention_layers(model)
    tower, _ = tower_of(model)
    size = tuple(images.shape[-2:])
    with ExitStack() as handles:
        if of_transformers(tower):
            numbers = {module: (number, path) for number, (path, module) in enumerate(layers)}

            @torch.no_grad()
            def on_call(module: nn.Module, call: Call, x: Tensor) -> None:
                if first:
                    mask = None if call.attn_mask is None else call.attn_mask[:1]
                    call = replace(call, q=call.q[:1], k=call.k[:1], v=call.v[:1], attn_mask=mask)
                    x = x[:1]
                grid = _grid(tower, size, x.shape[1]) if images.ndim == 4 else Grid((1, x.shape[1]))
                on_layer(_observed(*numbers[module], call, x, grid))

            handles.enter_context(transformers_attention.reading(list(numbers), on_call))
        for number, (path, module) in enumerate(layers):
            hook = _hook(tower, size, number, path, on_layer, first)
            handles.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield


def attention_map(call: Call, heads: slice = slice(None)) -> tuple[Tensor, Tensor]:
    """Return logits and attention (b, h, n, m) of some heads of a call, in float32 or float64.

    Logits include bias and masks; the attention of fully masked rows is 0.
    """
    with no_autocast(call.q.device):
        logits, dead = logits_of(call, heads)
        attn = logits.softmax(-1)
        return logits, attn if dead is None else attn.masked_fill(dead, 0.0)


def logits_of(call: Call, heads: slice = slice(None)) -> tuple[Tensor, Tensor | None]:
    """Return the logits of `attention_map` (b, h, n, m), and the mask of fully masked rows, None without such rows."""
    with no_autocast(call.q.device):
        q, k, _ = call.transformed()
        dtype = torch.promote_types(q.dtype, torch.float32)
        logits = (q[:, heads].to(dtype) * call.factor) @ k[:, heads].to(dtype).transpose(-1, -2)
        parts = (call.added(), call.allowed())
        added, keep = (p if p is None or p.shape[1] == 1 else p[:, heads] for p in parts)
        mask, dead = combine_masks(call.dense_bias(heads), added, keep, call.finite)
        return logits if mask is None else logits + mask, dead


def prefix_names(model: nn.Module, prefix: int) -> tuple[str, ...]:
    """Return the names of the prefix tokens: class, distillation, register 1, register 2, ..."""
    tower, _ = tower_of(model)
    # the tokens of NaFlexVit are parameters of `embeds`
    holder = getattr(tower, "embeds", tower)
    first = ("cls_token", "class"), ("class_embedding", "class"), ("dist_token", "distillation")
    names = [word for name, word in first if getattr(holder, name, None) is not None][:prefix]
    kind = "register" if getattr(holder, "reg_token", None) is not None else "prefix"
    return (*names, *(f"{kind} {i + 1}" for i in range(prefix - len(names))))


class _Recorder(Context):
    """Context that records attention calls instead of computing attention."""

    __slots__ = ("calls",)

    def __init__(self, mask: Any) -> None:
        if isinstance(mask, Context):
            state = (mask.positions, mask.encodings, mask.mask, mask.is_causal, mask.rope, mask.mixed)
        else:
            state = (None, (), mask, False)
        super().__init__(*state)
        self.calls: list[tuple[Call, Tensor]] = []

    def idle(self, module: nn.Module) -> bool:
        """Return False, so that layers without an encoding are recorded too."""
        del module
        return False

    def plain_mask(self, module: nn.Module, x: Tensor) -> None:
        """Return None, so that every layer calls `attend`."""
        del module, x

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, x: Tensor, dropout_p: float
    ) -> Tensor:
        """Record the call; the returned values are not used."""
        del dropout_p
        of_layer = getattr(module, "pos_enc", None)
        encodings = self.encodings if of_layer is None else (*self.encodings, *of_layer.parts())
        layer, masks = (
            getattr(module, "vispe_layer", 0),
            {"attn_mask": self.mask, "is_causal": self.is_causal},
        )
        self.calls.append((_call_with(q, k, v, encodings, self.positions, layer, x, **masks), x))
        return v


def _call_with(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    encodings: Any,
    pos: Positions | None,
    layer: int,
    x: Tensor,
    **masks: Any,
) -> Call:
    """Return the call with bias and transform of the encodings of a layer."""
    if not encodings:
        return Call(q, k, v, **masks)
    return Call(q, k, v, bias_of(encodings, pos, layer, x), transform_of(encodings, pos, layer, x), **masks)


def _hook(
    tower: nn.Module,
    size: tuple[int, ...],
    number: int,
    path: str,
    on_layer: Callable[[LayerAttention], None],
    first: bool,
) -> Callable[..., None]:
    @torch.no_grad()
    def describe(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rotation = None
        if first:
            args, kwargs = _first_sample(path, args, kwargs)
        if isinstance(module, Attention):
            call, x, pos = _own_call(module, *args, **kwargs)
        elif of_transformers(tower):
            if kwargs.get("vispe_context") is None:
                return  # recorded in transformers' attention interface
            recorder = _Recorder(kwargs["vispe_context"])
            module.forward(*args, **{**kwargs, "vispe_context": recorder})
            ((call, x),), pos = recorder.calls, recorder.positions
        else:
            swapped = _swap(_stock(module))
            assert swapped is not None
            bound = inspect.signature(swapped.forward).bind(module, *args, **kwargs)
            recorder = _Recorder(bound.arguments.get("attn_mask"))
            if bound.arguments.get("is_causal"):
                recorder.is_causal = True
            # vispe's layers get their context as the mask argument
            if hasattr(
                swapped, "vispe_attend"
            ):  # called on the class, as stock layers do not have the method
                swapped.vispe_attend(module, bound.arguments["x"], recorder)
            else:
                bound.arguments["attn_mask"] = recorder
                swapped.forward(*bound.args, **bound.kwargs)
            ((call, x),), pos = recorder.calls, recorder.positions
            rotation = _rotation(bound.arguments.get("rope"), bool(getattr(module, "rotate_half", False)))
        grid = pos.grid if pos is not None and pos.grid is not None else _grid(tower, size, x.shape[1])
        on_layer(_observed(number, path, call, x, grid, rotation))

    return describe


def _first_sample(
    path: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of an attention layer for the first sample of a batch."""
    rows = next(value.shape[0] for value in (*args, *kwargs.values()) if isinstance(value, Tensor))

    def select(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value[:1] if value.ndim > 1 and value.shape[0] == rows else value
        positions = value.positions if isinstance(value, Context) else value
        if isinstance(positions, Positions) and positions.coords.shape[0] > 1:
            raise UnsupportedHost(
                f"{path}: the attention of one sample cannot be read, as the positions of {rows} samples differ. Pass "
                "one image per batch."
            )
        return value.masked(select(value.mask), value.is_causal) if isinstance(value, Context) else value

    return tuple(map(select, args)), {name: select(value) for name, value in kwargs.items()}


def _observed(
    number: int, path: str, call: Call, x: Tensor, grid: Grid, rotation: PairRotation | None = None
) -> LayerAttention:
    if grid.axes != 2 or grid.tokens != x.shape[1]:
        raise ShapeError(
            f"{path} must have {counted(grid.prefix, 'prefix token')} and a grid of {grid.shape} patches, got "
            f"{counted(x.shape[1], 'token')}. Pass complete images, without dropped patches."
        )
    return LayerAttention(number, path, call, x, grid, rotation)


def _rotation(rope: Tensor | None, half: bool) -> PairRotation | None:
    """Return timm's rotation table (..., n, 2 d_h), sines before cosines, as a `PairRotation`."""
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
    """Return the call of a `vispe.Attention`, its input and positions, by the steps of its forward pass."""
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
    return _call_with(q, k, v, encodings, pos, module.layer, x, **masks), x, pos


def tower_of(model: nn.Module) -> tuple[nn.Module, str]:
    """Return the image tower of a model, and its path."""
    tower, path = model, ""
    if isinstance(model, DebiasedModel):
        inner, path = tower_of(model.tower)
        return inner, f"tower.{path}"
    if isinstance(model, TransformersModel):
        return model.net, "net."
    for name in ("visual", "trunk"):
        if isinstance(getattr(tower, name, None), nn.Module):
            tower, path = getattr(tower, name), f"{path}{name}."
    return tower, path


def _grid(tower: nn.Module, size: tuple[int, ...], tokens: int) -> Grid:
    """Return the grid of a model without encodings of vispe, from image and patch size."""
    embed = getattr(tower, "patch_embed", getattr(tower, "embeds", None))
    patch_size = getattr(embed, "patch_size", getattr(tower, "patch_size", None))
    if patch_size is None and of_transformers(tower):
        patch_size = getattr(tower.config, "patch_size", None)
    if patch_size is None:
        raise UnsupportedHost(f"The model must have a patch_size, got {type(tower).__name__} without.")
    patch = patch_size if isinstance(patch_size, tuple | list) else (patch_size, patch_size)
    if getattr(embed, "dynamic_img_pad", False):  # images are padded to complete patches; others are cropped
        shape = tuple(-(-n // step) for n, step in zip(size, patch, strict=True))
    else:
        convs = (m for m in tower.modules() if isinstance(m, nn.Conv2d) and m.stride == tuple(patch))
        padding = getattr(next(convs, None), "padding", (0, 0))
        padding = padding if isinstance(padding, tuple) else (0, 0)
        shape = tuple((n + 2 * p) // step for n, p, step in zip(size, padding, patch, strict=True))
    return Grid(shape, prefix=max(0, tokens - shape[0] * shape[1]))


def _stock(module: nn.Module) -> type[nn.Module]:
    """Return the library's class of an attention layer, converted or not."""
    kind = type(module)
    if kind in _STOCK or kind in timm_attention.SWAPS:
        return _STOCK.get(kind, kind)
    # importing open_clip takes a second, and models of timm do not need it
    from vispe.hosts.open_clip.attention import stock_type

    return stock_type(module)


def _swap(kind: type[nn.Module]) -> type[nn.Module] | None:
    """Return vispe's class for a stock class of attention layers; None if there is none."""
    if kind in timm_attention.SWAPS:
        return timm_attention.SWAPS[kind]
    from vispe.hosts.open_clip.attention import SWAPS

    return SWAPS.get(kind)


def _unreadable(module: nn.Module) -> str | None:
    """Return the reason why the maps of an attention layer cannot be computed; None if they can."""
    if isinstance(module, Attention):
        return None
    kind = _stock(module)
    if _swap(kind) is None:
        return f"{type(module).__name__} is not a supported attention layer"
    if kind in (DiffAttention, DiffParallelScalingBlock):
        return f"{kind.__name__} subtracts two maps per head"
    if getattr(module, "scaled_cosine", False):
        return "its logits are cosine similarities of queries and keys"
    if isinstance(module, nn.MultiheadAttention) and not module.batch_first:
        return "its inputs are not batch-first; build it with batch_first=True"
    return None
