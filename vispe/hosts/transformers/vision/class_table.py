"""Table of the classes that replace those of transformers, for each kind of vision tower."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from vispe.hosts.transformers.vision.attention import (
    ClipAttention,
    GridAttention,
    InternAttention,
    InternEncoder,
    InternLayer,
    JepaAttention,
    JepaLayer,
    PackedAttention,
    VideoMaeAttention,
)
from vispe.hosts.transformers.vision.base_towers import ConvertedVisionTower
from vispe.hosts.transformers.vision.dense_prediction import (
    DptEncoder,
    NestedEncoder,
    NestedLayer,
    SapiensAttention,
)
from vispe.hosts.transformers.vision.families import attentions, family_of
from vispe.hosts.transformers.vision.tower import (
    ClipTower,
    InternTower,
    JepaTower,
    MaskedTower,
    PackedTower,
    PatchesTower,
    PlainTower,
    RadioTower,
    VideoMaeTower,
)

_INTERN = (("encoder", InternEncoder), ("encoder.layer.*", InternLayer))
_NESTED = (("encoder", NestedEncoder), ("encoder.layer.*", NestedLayer))
# kind of a family: mixins of the tower, of its attention layers, and of other modules by path
SWAPS: dict[
    str, tuple[type[ConvertedVisionTower], type[nn.Module], tuple[tuple[str, type[nn.Module]], ...]]
] = {
    "packed": (PackedTower, PackedAttention, ()),
    "clip": (ClipTower, ClipAttention, ()),
    "grid": (PlainTower, GridAttention, ()),
    "plain": (PlainTower, ClipAttention, ()),
    "self": (PlainTower, VideoMaeAttention, ()),
    "dpt": (PlainTower, VideoMaeAttention, (("encoder", DptEncoder),)),
    "nested": (PlainTower, VideoMaeAttention, _NESTED),
    "radio": (RadioTower, GridAttention, ()),
    "nested_radio": (RadioTower, VideoMaeAttention, _NESTED),
    "sapiens": (PlainTower, SapiensAttention, ()),
    "masked": (MaskedTower, GridAttention, ()),
    "intern": (InternTower, InternAttention, _INTERN),
    "patches": (PatchesTower, ClipAttention, ()),
    "film": (VideoMaeTower, VideoMaeAttention, ()),
    "jepa": (JepaTower, JepaAttention, (("encoder.layer.*", JepaLayer),)),
}


def swapped(tower: nn.Module) -> Iterator[tuple[str, nn.Module, type[nn.Module]]]:
    """Yield (path, module, mixin) of every module inside a tower whose class is replaced."""
    _, attention, others = SWAPS[family_of(tower).kind]
    yield from ((path, module, attention) for _, path, module in attentions(tower))
    for path, mixin in others:
        if path.endswith(".*"):
            yield from ((path, block, mixin) for block in tower.get_submodule(path[:-2]))
        else:
            yield path, tower.get_submodule(path), mixin
