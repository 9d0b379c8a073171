"""Putting an encoding into the image tower of an open_clip model, and taking it out again.

Two kinds of towers: those that timm builds, where the trunk is converted as any timm model, and open_clip's own
`VisionTransformer`. In the latter, encodings shared by all blocks live at `visual.pos_enc.*`, those with
parameters per layer at `visual.transformer.resblocks.<i>.attn.pos_enc.*`; all other parameters keep their names,
and the text tower is never touched. All that can fail comes before the first change.

The words are `vispe.convert`, `vispe.restore` and `vispe.describe`; they call what is here, so that `import vispe`
need not import open_clip. For models that are built by name see `vispe.hosts.open_clip.names`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from open_clip.modified_resnet import ModifiedResNet
from open_clip.timm_model import TimmModel
from open_clip.transformer import Attention, VisionTransformer
from torch import nn

from vispe.encodings.base import Biased, Encoding, Mixing, Rotary
from vispe.encodings.registry import Spec, create_encoding
from vispe.errors import UnsupportedCombination, UnsupportedHost
from vispe.hosts.convert import convert, restore
from vispe.hosts.open_clip.attention import SWAPS, attentions, encodings_of, stock_type
from vispe.hosts.open_clip.tower import OVERRIDDEN, HostedTower, TowerState, hosted, resampled
from vispe.hosts.transplant.context import backend_in_words
from vispe.hosts.transplant.fitting import attach, check_axes, joined, refuse_patched, take_over
from vispe.hosts.transplant.words import finished, timm_terms, with_options


@dataclass
class _Plan:
    cls: type[HostedTower]
    shared: Encoding | None
    own: list[Encoding | None]  # one per attention layer
    inside: bool
    layered: bool


def image_tower(model: nn.Module) -> nn.Module:
    """Return what is converted in an object of open_clip: its own tower, or the trunk that timm made.

    Raises:
        UnsupportedHost: there is no vision transformer in it.
    """
    if isinstance(model, VisionTransformer):
        return model
    if isinstance(model, TimmModel):
        return model.trunk
    if isinstance(model, ModifiedResNet):
        raise UnsupportedHost(
            "The image tower is open_clip's ModifiedResNet, which has no positional encoding between its convolutions; "
            "choose a ViT tower, 'ViT-B-32' for one."
        )
    visual = getattr(model, "visual", None)
    if isinstance(visual, nn.Module):
        return image_tower(visual)
    raise UnsupportedHost(
        f"open_clip's {type(model).__name__} is no image tower, and text stays as it is; give vispe.convert the whole "
        "model or its `visual`."
    )


def convert_image_tower(
    model: nn.Module, spec: Spec, *, keep_abs: bool, keep_rope: bool, **options: Any
) -> None:
    """Convert the image tower in an object of open_clip; arguments and errors as of `vispe.convert`."""
    tower = image_tower(model)
    if not isinstance(tower, VisionTransformer):
        convert(tower, spec, keep_abs=keep_abs, keep_rope=keep_rope, **options)
        return
    if keep_rope or timm_terms(spec)[2]:
        raise UnsupportedCombination(
            "There is no rotary embedding to keep: open_clip's VisionTransformer has none; leave 'rope' out."
        )
    convert_tower(tower, *with_options(spec, keep_abs, options), sources=finished(spec))


def restore_image_tower(model: nn.Module) -> None:
    """Take the encoding out of the image tower in an object of open_clip; errors as of `restore_tower`."""
    tower = image_tower(model)
    if isinstance(tower, VisionTransformer):
        restore_tower(tower)
    else:
        restore(tower)


def convert_tower(
    tower: VisionTransformer,
    spec: list[dict[str, Any]],
    keep_abs: bool,
    built: bool = False,
    sources: Sequence[Encoding | None] = (),
) -> None:
    """Convert open_clip's own image tower in place, or exchange the encoding of a converted one.

    Args:
        tower: an image tower.
        spec: parsed spec of the encoding.
        keep_abs: keep the absolute table in use beside it.
        built: whether the tower is being built with the encoding, so that its table never counted.
        sources: finished encodings whose weights are taken over, one or None per term of the spec.
    """
    plan = _plan(tower, spec, sources)
    old = tower.vispe if isinstance(tower, HostedTower) else None
    table = old.table if old else None
    if keep_abs and tower.positional_embedding is None:
        _needs_table(old, "keep")
    if old:
        _strip(tower, old)
    grid = (tower.grid_size[0], tower.grid_size[1])
    if keep_abs:
        _bring_back(tower, table)
    elif tower.positional_embedding is not None:
        table = None if built else (tower.positional_embedding, grid)
        tower.register_parameter("positional_embedding", None)
    tower.vispe = TowerState(
        spec=spec,
        stock=type(tower),
        reference=old.reference if old else grid,
        table=None if keep_abs else table,
        lost=("absolute table",) * (built and not keep_abs) or (old.lost if old else ()),
        keep_abs=keep_abs,
        inside=plan.inside,
        layered=plan.layered,
    )
    tower.__class__ = plan.cls
    attach(tower, plan.shared)
    if plan.inside:
        for (layer, _, module), encoding in zip(attentions(tower), plan.own, strict=True):
            module.__class__ = SWAPS[stock_type(module)]
            module.vispe_layer = layer
            attach(module, encoding)
        for block in tower.transformer.resblocks:
            block.__class__ = SWAPS[stock_type(block)]
    tower.vispe.fixed = tuple(
        f"{path}.{name}"
        for path, e in encodings_of(tower)
        for name, p in e.named_parameters()
        if not p.requires_grad
    )


def restore_tower(tower: nn.Module) -> None:
    """Give a converted tower its own classes and absolute table back.

    Raises:
        UnsupportedHost: the tower is not converted.
        UnsupportedCombination: it was built with the encoding, so it never had a table.
    """
    if not isinstance(tower, HostedTower):
        raise UnsupportedHost(
            f"open_clip's {type(tower).__name__} has no encoding of vispe, so there is nothing to restore."
        )
    state = tower.vispe
    if state.lost:
        _needs_table(state, "restore")
    _strip(tower, state)
    _bring_back(tower, state.table)


def describe_tower(tower: HostedTower) -> str:
    """Return what is attached where in a converted tower, in a few lines."""
    state = tower.vispe
    table = "in use" if state.keep_abs else "taken out" if state.table else "none"
    lines = [
        f"open_clip {state.stock.__name__} with {' + '.join(str(s) for s in state.spec)}",
        f"  grid {tuple(tower.grid_size)}, trained at {state.reference}, 1 prefix token",
        f"  absolute table: {table}",
    ]
    if tower.pos_enc is not None:
        lines.append(f"  pos_enc: {tower.pos_enc.name}, {_count([tower.pos_enc])} parameters")
    layers = [m for _, _, m in attentions(tower)] if state.inside else []
    own = [m.pos_enc for m in layers if m.pos_enc is not None]
    if own:
        lines.append(f"  {len(own)} attention layers with their own: {own[0].name}, {_count(own)} parameters")
    if layers:
        backend = backend_in_words(all(m.fused_attn for m in layers), "fused attention is off")
        lines.append(f"  {len(layers)} attention layers swapped; backend {backend}")
    return "\n".join(lines)


def _count(encodings: Sequence[Encoding]) -> int:
    return sum(p.numel() for e in encodings for p in e.parameters())


def _plan(tower: VisionTransformer, spec: list[dict[str, Any]], sources: Sequence[Encoding | None]) -> _Plan:
    """Check everything and build the encodings, without touching the tower."""
    stock = tower.vispe.stock if isinstance(tower, HostedTower) else type(tower)
    cls = hosted(stock)
    refuse_patched(tower, stock.__name__, OVERRIDDEN)
    if not getattr(tower.patch_dropout, "exclude_first_token", True):
        raise UnsupportedHost(
            "The patch dropout of this tower may drop the class token (exclude_first_token=False), so the place of the "
            "tokens that remain is not known; use exclude_first_token=True."
        )
    layers = list(attentions(tower))
    like = tower.class_embedding
    facts = {
        "dim": tower.conv1.out_channels,
        "num_heads": getattr(layers[0][2], "num_heads", None) if layers else None,
        "depth": len(layers),
        "grid": tuple(tower.grid_size),
    }

    def build() -> tuple[Encoding, ...]:
        with torch.device(like.device):
            made = create_encoding(spec, **facts).to(dtype=like.dtype).train(tower.training).parts()
        for encoding, source in zip(made, sources, strict=False):
            if source is not None:
                take_over(encoding, source, "tower")
        return made

    parts = build()
    for e in parts:
        check_axes(e, 2, stock)
        if isinstance(e, Mixing) and e.per_layer:
            raise UnsupportedCombination(
                f"{e.name} mixes tokens between blocks; keep its parameters in one module for all blocks (per_layer "
                "False)."
            )
    inside = any(isinstance(e, Biased | Rotary) for e in parts)
    if inside:
        _check_blocks(tower)
    layered = any(e.per_layer for e in parts)
    own: list[Encoding | None] = []
    for layer, _, _ in layers:
        mine = [e for e in build() if e.per_layer and e.active(layer)] if layered else []
        own.append(joined(mine))
    return _Plan(cls, joined([e for e in parts if not e.per_layer]), own, inside, layered)


def _check_blocks(tower: VisionTransformer) -> None:
    """Raise when a context cannot reach the attention of a block, or attention is not one that vispe knows."""
    if not getattr(tower.transformer, "batch_first", True):
        raise UnsupportedHost(
            "This tower runs its blocks with the sequence first (batch_first=False); build it with batch_first=True, "
            "or use an additive encoding."
        )
    for (i, where, attn), block in zip(attentions(tower), tower.transformer.resblocks, strict=True):
        path = f"transformer.resblocks.{i}"
        for module, at in ((block, path), (attn, where)):
            if stock_type(module) not in SWAPS:
                raise UnsupportedHost(
                    f"{at} is a {type(module).__name__}; vispe knows "
                    f"{', '.join(c.__name__ for c in SWAPS)}. Use an additive encoding instead."
                )
            refuse_patched(module, at, ("forward", "attention"))
        if isinstance(attn, Attention) and attn.logit_scale is not None:
            raise UnsupportedHost(
                f"{where} is scaled cosine attention, which open_clip itself cannot run; build the tower without "
                "scaled_cosine_attn."
            )
        if isinstance(attn, nn.MultiheadAttention) and (
            attn.in_proj_weight is None or attn.bias_k is not None
        ):
            raise UnsupportedHost(
                f"{where} has separate projections or a bias token (bias_k), which open_clip's towers do not; use "
                "an additive encoding, or vispe.Attention in your own blocks."
            )


def _strip(tower: HostedTower, state: TowerState) -> None:
    """Take the encodings and swapped classes away; the absolute table stays as it is."""
    if state.inside:
        for _, _, module in attentions(tower):
            module.__class__ = stock_type(module)
            del module.vispe_layer, module.pos_enc
            vars(module).pop("fused_attn", None)
        for block in tower.transformer.resblocks:
            block.__class__ = stock_type(block)
    del tower.pos_enc, tower.vispe
    tower.__class__ = state.stock


def _bring_back(tower: VisionTransformer, kept: tuple[nn.Parameter, tuple[int, ...]] | None) -> None:
    """Put the absolute table back, on the device and in the dtype that the tower has now."""
    if kept is None or tower.positional_embedding is not None:
        return
    table, old = kept
    grid, like = (tower.grid_size[0], tower.grid_size[1]), tower.class_embedding
    if grid != tuple(old) or table.device != like.device or table.dtype != like.dtype:
        values = resampled(table.detach(), (old[0], old[1]), grid).to(like)
        table = nn.Parameter(values, requires_grad=table.requires_grad)
    tower.positional_embedding = table


def _needs_table(state: TowerState | None, verb: str) -> None:
    if state is None or state.table is None:
        raise UnsupportedCombination(
            f"There is no absolute table to {verb}: the tower was built without one. Build the stock model with "
            "open_clip.create_model(...) and load its weights instead."
        )
