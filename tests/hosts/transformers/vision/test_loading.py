"""Loading the weights of one encoding into a tower with another raises, directly or inside its model."""

from __future__ import annotations

import itertools

import pytest
import torch

import vispe
from tests.hosts.common.test_state_dict_loading import named
from tests.hosts.helpers import shake
from tests.hosts.transformers.tiny import make
from tests.hosts.transformers.vision.oracle import tower
from vispe.errors import EncodingMismatch
from vispe.hosts.transformers.vision.convert import convert_vision, vision_tower_of

SPECS = (
    "alibi2d",
    "rope_axial",
    "rope_mixed",
    "irpe",
    "alibi2d(slopes=learned)",
    "rope_axial+alibi2d(slopes=learned)",
)
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "llava_onevision", "internvl")


def converted(model, spec, seed):
    convert_vision(model, spec, keep_rope=False, keep_abs=False)
    return shake(model, seed)


PAIRS = list(itertools.product(SPECS, SPECS))
FEW = PAIRS[:: len(SPECS) + 1] + [(a, SPECS[k - 1]) for k, a in enumerate(SPECS)]  # itself and its neighbour


@pytest.mark.parametrize(
    ("family", "pairs"),
    [(FAMILIES[0], FEW), *(pytest.param(f, PAIRS, marks=pytest.mark.slow) for f in FAMILIES)],
    ids=[f"{FAMILIES[0]}-few", *FAMILIES],
)
def test_every_pair_of_encodings(family, pairs):
    stock = tower(family).state_dict()
    for a, b in pairs:
        theirs, ours = converted(tower(family), a, 5), converted(tower(family), b, 1)
        weights = theirs.state_dict()
        if a == b:
            assert not any(ours.load_state_dict(weights))
            assert all(torch.equal(v, weights[k]) for k, v in ours.state_dict().items())
            continue
        with pytest.raises(EncodingMismatch, match=f"{named(a)}, but .* has {named(b)}"):
            ours.load_state_dict(weights)
        if extra := {n for n in weights if "pos_enc" in n} - set(ours.state_dict()):
            assert extra <= set(ours.load_state_dict(dict(weights), strict=False).unexpected_keys)
            with pytest.raises(RuntimeError, match=f"weights of another encoding.* has {named(b)}"):
                ours.load_state_dict(dict(weights))
    for spec in SPECS:
        assert not any(converted(tower(family), spec, 1).load_state_dict(stock))
        at = next(n for n in stock if "attn" in n or "attention" in n).rpartition(".")[0].rpartition(".")[0]
        with pytest.raises(RuntimeError, match=f"{at}.pos_enc.JUNK"):
            converted(tower(family), spec, 1).load_state_dict({**stock, f"{at}.pos_enc.JUNK": torch.zeros(1)})


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_inside_a_model(family):
    theirs, ours = make(family), make(family)
    for model, spec in ((theirs, "rope_mixed"), (ours, "rope_axial")):
        convert_vision(model, spec, keep_rope=False, keep_abs=False)
    with pytest.raises(EncodingMismatch, match=r"'rope_mixed', but .* has 'rope_axial'"):
        ours.load_state_dict(theirs.state_dict())
    with pytest.raises(RuntimeError, match=r"Unexpected key.*pos_enc\.freqs"):
        ours.load_state_dict(dict(theirs.state_dict()))
    ours.load_state_dict(make(family).state_dict())
    vispe.restore(vision_tower_of(ours))
    ours.load_state_dict(make(family).state_dict())
