"""Tables for one grid are resampled on loading into models of another image size, as in the forward pass."""

import logging

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models import load_checkpoint, save_for_hf

import vispe
from tests.cases import cases
from tests.hosts.helpers import RELEASE, SHAPE, image, shake, tiny
from tests.products import partly
from vispe.errors import EncodingMismatch

SPECS = (
    "learned",
    "rpb",
    "rpb.beit",
    "rpb(resample=bicubic)",
    "rpb(share_layers=true)",
    "loope.cells",
    "learned+rpb",
    "sincos2d+rpb.beit(share_layers=true)",
)
SIZES = ((24, 40), (32, 32), (56, 48), (8, 16))  # smaller, larger and turned


def converted(spec, size, seed):
    return shake(vispe.convert(tiny(img_size=size), spec), seed).eval()


def moved(model, size):
    """Return the table that the encoding computes for another image size."""
    model.set_input_size(size)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("new", SIZES)
@pytest.mark.parametrize("old", SIZES)
@pytest.mark.parametrize("spec", SPECS)
def test_a_table_is_resampled_as_the_forward_pass_does(spec, old, new, caplog):
    theirs, ours = converted(spec, old, 5), converted(spec, new, 1)
    weights = theirs.state_dict()
    remaining = {name: value.clone() for name, value in weights.items()}
    with caplog.at_level(logging.INFO, logger="vispe"):
        assert not any(ours.load_state_dict(weights))
    assert all(torch.equal(weights[name], value) for name, value in remaining.items()), (
        "the caller's dict changed"
    )
    grids = tuple(tuple(n // 8 for n in size) for size in (old, new))
    assert (f"is resampled from the grid {grids[0]} to {grids[1]}" in caplog.text) == (old != new)
    x = image(2, 3, *new)
    torch.testing.assert_close(ours(x), moved(theirs, new)(x), rtol=1e-5, atol=1e-5)
    if old == new:
        state = ours.state_dict()
        assert all(torch.equal(state[name], value) for name, value in remaining.items())


def test_grids_with_equal_token_counts():
    """9 x 4 and 6 x 6 have equal numbers of cells; (2 x 8) and (3 x 5) equal numbers of offsets."""
    for spec, old, new in (("learned", (72, 32), (48, 48)), ("rpb", (16, 64), (24, 40))):
        theirs, ours = converted(spec, old, 5), converted(spec, new, 1)
        ours.load_state_dict(theirs.state_dict())
        x = image(2, 3, *new)
        torch.testing.assert_close(ours(x), moved(theirs, new)(x), rtol=1e-5, atol=1e-5)


@partly(4)
@cases("spec", SPECS)
def test_the_grid_defaults_to_a_square(spec, tmp_path):
    x = image(2, 3, 24, 40)
    square, wide = converted(spec, (32, 32), 5), converted(spec, (56, 48), 5)
    for path in (tmp_path / "a.pth", tmp_path / "a.safetensors"):
        if path.suffix == ".pth":
            torch.save({"model": dict(square.state_dict())}, path)
        else:
            save_file(square.state_dict(), path)
        ours = converted(spec, (24, 40), 1)
        load_checkpoint(ours, str(path))
        built = timm.create_model(
            "vit_tiny_patch16_224", pos_embed=spec, checkpoint_path=str(path), **SHAPE
        ).eval()
        assert torch.equal(built(x), ours(x))
    torch.testing.assert_close(ours(x), moved(square, (24, 40))(x), rtol=1e-5, atol=1e-5)
    if "loope" in spec:  # a table with two axes says its grid
        ours.load_state_dict(dict(wide.state_dict()))
        return
    with pytest.raises(EncodingMismatch, match=r"its model has the grid \(3, 5\).* does not record its grid"):
        ours.load_state_dict(dict(wide.state_dict()))


@pytest.mark.skipif(RELEASE < (1, 0, 31), reason="timm keeps the arguments of a model from 1.0.31 on")
@partly(4)
@cases("spec", SPECS)
def test_hub_folders_at_another_size(spec, tmp_path):
    model = shake(
        timm.create_model("vit_tiny_patch16_224", pos_embed=spec, **{**SHAPE, "img_size": 32})
    ).eval()
    save_for_hf(model, tmp_path)
    ours = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, img_size=(24, 40)).eval()
    x = image(2, 3, 24, 40)
    torch.testing.assert_close(ours(x), moved(model, (24, 40))(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes_and_gradients(dtype):
    theirs, ours = (
        converted("learned+rpb", (32, 32), 5).to(dtype),
        converted("learned+rpb", (24, 40), 1).to(dtype),
    )
    ours.load_state_dict(theirs.state_dict())
    table = ours.blocks[1].attn.pos_enc.relative_position_bias_table
    assert table.dtype == dtype
    assert table.requires_grad
    ours.load_state_dict(theirs.state_dict(), assign=True)
    assert torch.equal(ours.blocks[1].attn.pos_enc.relative_position_bias_table, table)


def test_a_matrix_over_all_cells_is_rejected():
    spec = "loope.released"
    theirs, ours = converted(spec, (32, 32), 5), converted(spec, (24, 40), 1)
    for weights in (theirs.state_dict(), dict(theirs.state_dict())):
        with pytest.raises(
            EncodingMismatch, match=r"16 cells of the grid.* the model has \(3, 5\).*grid=\[h,w\]"
        ):
            ours.load_state_dict(weights)
    remaining = converted("loope.released(grid=[4,4])", (24, 40), 1)
    remaining.load_state_dict(theirs.state_dict())
    x = image(2, 3, 24, 40)
    assert torch.equal(remaining(x), moved(theirs, (24, 40))(x))


def test_custom_attention_and_a_window():
    weights = shake(
        vispe.Attention(32, 4, vispe.create_encoding("rpb", num_heads=4, grid=(3, 4))), 5
    ).state_dict()
    ours = vispe.Attention(32, 4, vispe.create_encoding("rpb", num_heads=4, grid=(4, 5)))
    theirs = vispe.Attention(32, 4, vispe.create_encoding("rpb", num_heads=4, grid=(3, 4)))
    theirs.load_state_dict(weights)
    ours.load_state_dict(weights)
    x, grid = torch.randn(2, 20, 32), vispe.Grid((4, 5))
    torch.testing.assert_close(ours(x, grid), theirs(x, grid))
    model = converted("rpb(window=[3,4])", (32, 32), 5)
    fresh = converted("rpb(window=[3,4])", (24, 40), 1)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(image()), moved(model, (24, 40))(image()))


@pytest.mark.parametrize("spec", ["learned", "rpb", "loope.cells"])
def test_open_clip(spec):
    pytest.importorskip("open_clip")
    from tests.hosts.open_clip.common import tiny_tower

    theirs = shake(vispe.convert(tiny_tower(image_size=(32, 32)), spec), 5).eval()
    ours = shake(vispe.convert(tiny_tower(), spec), 1).eval()
    ours.load_state_dict(theirs.state_dict())
    theirs.vispe.reference = ours.vispe.reference
    torch.testing.assert_close(ours(image()), theirs(image()), rtol=1e-5, atol=1e-5)
