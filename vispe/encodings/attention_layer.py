"""`Attention`: multi-head self-attention with a positional encoding, for hand-written ViTs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from einops import rearrange
from torch import Tensor, nn

from vispe.attention import attention
from vispe.encodings.base import Additive, Encoding, Mixing
from vispe.encodings.compose import bias_of, transform_of, value_term_of
from vispe.encodings.creation import create_encoding
from vispe.encodings.multi_softmax import branches_of
from vispe.encodings.parts.preparation import check_samplers, prepare
from vispe.encodings.registry import Spec, encoding_class, parse_spec, plain_terms
from vispe.encodings.saved_spec import check_same_spec, keep
from vispe.errors import OptionError, UnsupportedCombination
from vispe.grid import Grid, Positions, as_positions
from vispe.utils.offloading import loaded


class Attention(nn.Module):
    """Multi-head self-attention with a positional encoding.

    Args:
        dim: width of the tokens, d.
        num_heads: heads, h; divides dim unless `head_dim` is set.
        encoding: spec or instance of an encoding that works inside attention; None for none.
        fused_qkv: one projection `qkv` (rows q, k, v, each head-major) instead of `q_proj`, `k_proj`, `v_proj`.
        qkv_bias: whether these have a bias.
        qk_norm: constructor of the norms of queries and keys from head_dim, such as ``torch.nn.LayerNorm``.
        proj: whether to apply an output projection.
        head_dim: channels of a head, d_h; dim / num_heads by default.
        layer: index of the block, for encodings that differ between blocks.
        backend: attention backend: 'auto', or a backend name of `vispe.attention`.

    Shapes: x (b, n, d) -> (b, n, d), or (b, n, h d_h) without an output projection.

    Raises:
        OptionError: dim is not a multiple of num_heads, and head_dim is not set.
        UnsupportedCombination: the encoding works outside of attention (additive, mixing).
        UnknownEncoding: the encoding or preset does not exist.

    Example:
        >>> import torch
        >>> layer = Attention(dim=32, num_heads=4, encoding="alibi2d")
        >>> layer(torch.randn(2, 6, 32), (2, 3)).shape
        torch.Size([2, 6, 32])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        encoding: Spec | None = None,
        *,
        fused_qkv: bool = True,
        qkv_bias: bool = True,
        qk_norm: Callable[[int], nn.Module] | None = None,
        proj: bool = True,
        head_dim: int | None = None,
        layer: int = 0,
        backend: Any = "auto",
    ) -> None:
        super().__init__()
        if head_dim is None and dim % num_heads:
            raise OptionError(
                f"Attention needs dim to be a multiple of num_heads, got dim={dim}, num_heads={num_heads}. "
                "Choose another num_heads, or pass head_dim."
            )
        self.num_heads, self.layer, self.backend = num_heads, layer, backend
        head_dim = dim // num_heads if head_dim is None else head_dim
        inner = num_heads * head_dim
        # rows of queries, then keys, then values
        self.qkv = nn.Linear(dim, 3 * inner, bias=qkv_bias) if fused_qkv else None
        for name in () if fused_qkv else ("q_proj", "k_proj", "v_proj"):
            setattr(self, name, nn.Linear(dim, inner, bias=qkv_bias))
        # norms over the channels of one head, before any rotation
        self.q_norm = nn.Identity() if qk_norm is None else qk_norm(head_dim)
        self.k_norm = nn.Identity() if qk_norm is None else qk_norm(head_dim)
        self.proj = nn.Linear(inner, dim) if proj else nn.Identity()
        self.pos_enc = None
        if encoding is not None:
            _works_inside(encoding)
            self.pos_enc = create_encoding(encoding, dim=dim, num_heads=num_heads, head_dim=head_dim)
            check_samplers(self.pos_enc.parts())

    def _terms(self) -> list[dict[str, Any]]:
        return [] if self.pos_enc is None else plain_terms(self.pos_enc)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        keep(destination, prefix, self._terms())

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        # weights of another encoding may have equal shapes, so the specs are compared
        check_same_spec(local_metadata, self._terms(), f"attention {prefix.removesuffix('.')}".rstrip())
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def _encodings(self) -> Sequence[Encoding]:
        return self.pos_enc.parts() if self.pos_enc is not None else ()

    def forward(
        self,
        x: Tensor,
        where: Positions | Grid | Sequence[int],
        *,
        attn_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the tokens after attention.

        Args:
            x: tokens (b, n, d), prefix tokens first, then the grid row-major.
            where: their positions, their `Grid`, or the shape of the grid if there are no prefix tokens.
                Pass the same `Positions` to all layers to share cached tensors.
            attn_mask: bool (True = attend) or additive float, broadcastable to (b, h, n, n).
            key_padding_mask: bool (b, n), True = a real key.
        """
        pos = as_positions(where, x)
        if self.pos_enc is not None:
            # samplers with per='sample' need the batch size
            pos = prepare(self.pos_enc.parts(), pos, batch=x.shape[0])
        if self.qkv is not None:
            q, k, v = rearrange(self.qkv(x), "b n (three h d) -> three b h n d", three=3, h=self.num_heads)
        else:
            parts = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
            q, k, v = (rearrange(t, "b n (h d) -> b h n d", h=self.num_heads) for t in parts)
        out = attend(
            self.q_norm(q),
            self.k_norm(k),
            v,
            self._encodings(),
            pos,
            self.layer,
            x,
            attn_mask=attn_mask,
            key_padding_mask=key_padding_mask,
            backend=self.backend,
        )
        return self.proj(rearrange(out, "b h n d -> b n (h d)"))


def _works_inside(spec: Spec) -> None:
    """Raise for encodings that work outside of attention, before they require `HOST_FACTS`."""
    if isinstance(spec, Encoding):
        classes = [type(e) for e in spec.parts()]
    elif isinstance(spec, list | tuple):
        for member in spec:
            _works_inside(member)
        return
    else:
        classes = [encoding_class(term["name"]) for term in parse_spec(spec)]
    outside = [c.name for c in classes if issubclass(c, Additive | Mixing)]
    if outside:
        raise UnsupportedCombination(
            f"Attention accepts encodings that work inside attention, got {' + '.join(outside)}"
            ", which works on the tokens "
            "outside of attention. Call encoding.embed(x, positions) before the blocks instead."
        )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    encodings: Sequence[Encoding],
    pos: Positions,
    layer: int,
    x: Tensor | None = None,
    **arguments: Any,
) -> Tensor:
    """Return attention with the bias, transform and value term of `encodings` in block `layer`.

    Args:
        q: queries (b, h, n, d_h) after qk-norm.
        k: keys, likewise.
        v: values.
        encodings: encodings of the model; those that work outside attention are ignored.
        pos: prepared positions of the tokens.
        layer: index of the block.
        x: the block's input to attention (b, n, d), for encodings with gates.
        **arguments: further arguments of `vispe.attention`.

    An encoding with branches attends once per branch; dropout applies to each branch separately.
    """
    # biases may be functions that read weights while attention runs
    with loaded(encodings):
        branches = branches_of(encodings, pos, layer, x)
        if branches:
            outs = [attention(q, k, v, bias=b.bias, transform=b.transform, **arguments) for b in branches]
            # gates are float32; cast to the dtype of the attention output, which differs from q's under autocast
            weighted = [b.gate.to(out.dtype) * out for b, out in zip(branches, outs, strict=True)]
            return sum(weighted[1:], weighted[0])
        return attention(
            q,
            k,
            v,
            bias=bias_of(encodings, pos, layer, x),
            transform=transform_of(encodings, pos, layer, x),
            value_term=value_term_of(encodings, pos, layer),
            **arguments,
        )
