"""What a converted model of timm says of itself."""

from __future__ import annotations

from collections.abc import Sequence

from vispe.encodings.base import Encoding
from vispe.hosts.timm.attention import attentions
from vispe.hosts.timm.family import family_of, has_rope
from vispe.hosts.timm.hosted import HostedTimm
from vispe.hosts.transplant.context import backend_in_words


def describe_timm(model: HostedTimm) -> str:
    """Return what is attached where, in a few lines."""
    state = model.vispe
    table = "in use" if state.keep_abs else "taken out" if state.table else "none"
    lines = [
        f"{state.stock.__name__} with {' + '.join(str(s) for s in state.spec)}",
        f"  grid {family_of(model).grid(model)}, trained at {state.reference}, "
        f"{model.num_prefix_tokens} prefix tokens",
        f"  absolute table: {table}",
    ]
    if has_rope(model) or state.rope:
        lines.append(f"  own rotary embedding: {'in use' if state.keep_rope else 'taken out'}")
    if model.pos_enc is not None:
        lines.append(f"  pos_enc: {model.pos_enc.name}, {_count([model.pos_enc])} parameters")
    layers = [m for _, _, m in attentions(model)] if state.inside else []
    own = [m.pos_enc for m in layers if m.pos_enc is not None]
    if own:
        lines.append(f"  {len(own)} attention layers with their own: {own[0].name}, {_count(own)} parameters")
    if layers:
        backend = backend_in_words(all(m.fused_attn for m in layers), "fused attention is off")
        lines.append(f"  {len(layers)} attention layers swapped; backend {backend}")
    return "\n".join(lines)


def _count(encodings: Sequence[Encoding]) -> int:
    return sum(p.numel() for e in encodings for p in e.parameters())
