"""Cards of released weights: every model is created, and a state dict with the released names loads strictly."""

import json
from pathlib import Path

import pytest
import timm

import vispe

CARDS = json.loads((Path(__file__).parents[1] / "models" / "released.json").read_text())


@pytest.mark.parametrize("card", CARDS, ids=lambda c: c["name"])
def test_released_weights_load(card, tmp_path):
    small = {"depth": 2, "img_size": 56}
    stock = timm.create_model(card["arch"], **small)
    released = {k: v for k, v in stock.state_dict().items() if k != "pos_embed"}
    model = timm.create_model(card["arch"], pos_embed=card["pos_embed"], **small)
    model.load_state_dict(released, strict=True)
    assert vispe.describe(model).startswith("VisionTransformer with")
    assert all(v.equal(model.state_dict()[k]) for k, v in released.items())
