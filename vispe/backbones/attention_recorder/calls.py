"""Arguments of an attention layer as one `Call`, without computing attention."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from vispe.attention.call import Call
from vispe.attention.transform.pairs import PairRotation
from vispe.backbones.attention_recorder.layers import stock_type_of, swapped_type
from vispe.encodings.attention_layer import Attention
from vispe.encodings.compose import bias_of, transform_of
from vispe.encodings.parts.preparation import prepare
from vispe.errors import UnsupportedHost
from vispe.grid import Positions, as_positions
from vispe.hosts.common.context import Context


def recorded_call(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], of_transformers: bool
) -> tuple[Call, Tensor, Positions | None, PairRotation | None] | None:
    """Return the call of an attention layer, its input (b, n, d), positions, and the model's own rotation.

    Args:
        module: the layer.
        args: its positional arguments.
        kwargs: its keyword arguments.
        of_transformers: whether the model is one of transformers.

    Returns:
        None for stock layers of transformers, which are recorded in transformers' attention interface.
    """
    if isinstance(module, Attention):
        return *_own_call(module, *args, **kwargs), None
    if of_transformers:
        if kwargs.get("vispe_context") is None:
            return None
        recorder = _Recorder(kwargs["vispe_context"])
        module.forward(*args, **{**kwargs, "vispe_context": recorder})
        ((call, x),) = recorder.calls
        return call, x, recorder.positions, None
    swapped = swapped_type(stock_type_of(module))
    assert swapped is not None
    bound = inspect.signature(swapped.forward).bind(module, *args, **kwargs)
    recorder = _Recorder(bound.arguments.get("attn_mask"))
    if bound.arguments.get("is_causal"):
        recorder.is_causal = True
    # vispe's layers get their context as the mask argument; methods are called on the class, as stock layers lack them
    if hasattr(swapped, "vispe_attend"):
        swapped.vispe_attend(module, bound.arguments["x"], recorder)
    else:
        bound.arguments["attn_mask"] = recorder
        swapped.forward(*bound.args, **bound.kwargs)
    rotation = _rotation(bound.arguments.get("rope"), bool(getattr(module, "rotate_half", False)))
    ((call, x),) = recorder.calls
    return call, x, recorder.positions, rotation


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


def _rotation(rope: Tensor | None, half: bool) -> PairRotation | None:
    """Return timm's rotation table (..., n, 2 d_h), sines before cosines, as a `PairRotation`."""
    if rope is None:
        return None
    sin, cos = (t[..., : t.shape[-1] // 2] if half else t[..., ::2] for t in rope.float().chunk(2, -1))
    sin, cos = (t.reshape((1,) * (4 - t.ndim) + tuple(t.shape)) for t in (sin, cos))
    return PairRotation(cos, sin, "half" if half else "interleaved")


def first_sample(
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
