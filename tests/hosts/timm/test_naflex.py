"""timm's NaFlexVit: images and packed patches; samples of a batch are independent."""

import copy
import pickle

import pytest
import timm
import torch
from timm.models import NaFlexVit

import vispe
from tests.cases import cases
from tests.hosts.helpers import close, dense, grads, image, shake
from tests.hosts.packed import NAFLEX, naflex, pack, sample_of
from vispe.errors import ShapeError, UnsupportedCombination

SIZES = [(3, 5), (4, 2), (1, 6)]
SPECS = [
    "none",
    "alibi2d",
    "alibi2d(slopes=learned)",
    "sincos2d",
    "learned",
    "rope_axial",
    "learn+sincos2d+alibi2d",
]
ROPES = ["axial", "mixed", "dinov3"]


def masks(sizes, prefix: int, tokens: int) -> torch.Tensor:
    """Return -distance of every sample within its grid, and -inf for padded keys, (b, 1, n, n)."""
    out = torch.zeros(len(sizes), 1, prefix + tokens, prefix + tokens)
    for i, (h, w) in enumerate(sizes):
        end = prefix + h * w
        out[i, 0, :end, :end] = -dense(h, w, prefix)
        out[i, 0, :, end:] = float("-inf")
    return out


def through(model, batch, mask, keep=None) -> torch.Tensor:
    """Return tokens after the blocks of timm under a dense mask (model without table and rope)."""
    x, _ = model.embeds(batch["patches"], patch_coord=batch["patch_coord"], patch_valid=batch["patch_valid"])
    x = x if keep is None else x.gather(1, keep[..., None].expand(-1, -1, x.shape[-1]))
    for block in model.blocks:
        x = block(model.norm_pre(x) if block is model.blocks[0] else x, attn_mask=mask)
    return model.norm(x)


@cases("options", [{}, {"attn_type": "eva"}, {"qk_norm": True, "pre_norm": True}], ids=str)
def test_a_bias_is_combined_with_the_padding_mask_per_sample_with_gradients(options):
    stock = naflex(pos_embed="none", **options)
    ours, batch = vispe.convert(copy.deepcopy(stock), "alibi2d"), pack(SIZES)
    expected = through(stock, batch, masks(SIZES, 3, 15))
    expected = stock.forward_head(expected, patch_valid=batch["patch_valid"])
    actual = ours(batch)
    close(actual, expected)
    close(grads(ours, actual), grads(stock, expected))
    assert (stock(batch) - expected).abs().max() > 1e-3


@cases("spec", SPECS)
def test_packed_samples_are_independent(spec):
    model, batch = vispe.convert(naflex(), spec), pack(SIZES, tokens=17)
    close(model(batch), torch.cat([model(sample_of(batch, i)) for i in range(3)]))
    parts = {k: batch[k] for k in ("patch_coord", "patch_valid")}
    assert torch.equal(model(batch["patches"], **parts), model(batch))


@cases("spec", SPECS)
def test_packed_patches_equal_the_image(spec):
    model, x = vispe.convert(naflex(), spec), image()
    patches = x.unflatten(3, (5, 8)).unflatten(2, (3, 8)).permute(0, 2, 4, 3, 5, 1).flatten(1, 2).flatten(2)
    batch = {**pack([(3, 5)] * 2), "patches": patches}
    close(model(batch), model(x))
    if "learn+" in spec:  # timm itself gives its table to tokens by their number, not by their coordinates
        return
    order = torch.randperm(15, generator=torch.Generator().manual_seed(0))
    close(model({k: v[:, order] for k, v in batch.items()}), model(x))


@cases("table", ["learned", "factorized"])
@cases("spec", SPECS[:-1])
def test_restore_is_exact_and_stock_weights_load_strictly(spec, table):
    stock, batch = naflex(pos_embed=table, rope_type="mixed"), pack(SIZES)
    weights = copy.deepcopy(stock.state_dict())
    ours = vispe.convert(copy.deepcopy(stock), spec)
    assert not [n for n in ours.state_dict() if "pos_embed" in n or n.startswith("rope")]
    ours.load_state_dict(weights)
    out = ours(batch)
    assert torch.equal(pickle.loads(pickle.dumps(ours))(batch), out)
    assert torch.equal(copy.deepcopy(ours)(batch), out)
    assert type(vispe.restore(ours)) is NaFlexVit
    assert list(ours.state_dict()) == list(weights)
    assert torch.equal(ours(batch), stock(batch))
    assert torch.equal(ours(image()), stock(image()))
    assert type(ours.embeds.pos_drop) is torch.nn.Dropout


@cases("rope", ROPES)
def test_table_and_rope_are_retained_on_request(rope):
    stock, batch = naflex(rope_type=rope), pack(SIZES)
    same = vispe.convert(copy.deepcopy(stock), "learn+rope")
    assert torch.equal(same(batch), stock(batch))
    assert torch.equal(same(image()), stock(image()))
    both = vispe.convert(copy.deepcopy(stock), "learn+rope+alibi2d")
    close(both(batch), torch.cat([both(sample_of(batch, i)) for i in range(3)]))
    assert (both(batch) - same(batch)).abs().max() > 1e-3
    both.set_grad_checkpointing()
    both.train()(batch).sum().backward()
    assert all(p.grad is not None for n, p in both.named_parameters() if "fc_norm" not in n)


def test_dropped_tokens_keep_their_positions_and_their_padding():
    stock = naflex(pos_embed="none", patch_drop_rate=0.4)
    ours, batch = vispe.convert(copy.deepcopy(stock), "alibi2d").train(), pack(SIZES)
    torch.manual_seed(3)
    keep = ours.patch_drop(torch.zeros(3, 18, 1))[1]
    tokens = torch.cat([torch.arange(3).expand(3, -1), keep + 3], 1)
    torch.manual_seed(3)
    out = ours.forward_features(**batch)
    mask = torch.stack([m[:, t][:, :, t] for m, t in zip(masks(SIZES, 3, 15), tokens, strict=True)])
    expected = through(stock, batch, mask, tokens)
    recorded = torch.cat([torch.ones(3, 3, dtype=torch.bool), out["patch_valid"]], 1)
    assert torch.equal(out["patch_valid"], batch["patch_valid"].gather(1, keep))
    close(out["patches"][recorded], expected[recorded])
    torch.manual_seed(3)
    assert vispe.convert(ours, "learned+rope_axial").train()(batch).isfinite().all()


def test_dropout_is_applied_after_the_encoding():
    ours = vispe.convert(naflex(pos_drop_rate=0.5), "sincos2d").train()
    torch.manual_seed(0)
    assert (ours._forward_embeds(image(), None, None, None)["patches"] == 0).float().mean() > 0.4


def test_a_mask_of_the_user_replaces_the_padding_mask_as_in_timm():
    stock = naflex(pos_embed="none")
    ours, batch = vispe.convert(copy.deepcopy(stock), "alibi2d"), pack([(3, 5)] * 2)
    mask = torch.randn(2, 1, 18, 18, generator=torch.Generator().manual_seed(1))
    expected = through(stock, batch, mask - dense(3, 5, 3))
    close(ours.forward_features(**batch, attn_mask=mask)["patches"], expected)


@cases("spec", ["alibi2d", "none", "sincos2d"])
def test_intermediates_agree_with_features(spec):
    ours, batch = vispe.convert(naflex(), spec), pack(SIZES)
    actual = ours.forward_intermediates(batch, output_fmt="NLC", output_dict=True)
    assert torch.equal(actual["image_features"], ours.forward_features(**batch)["patches"])
    assert torch.equal(actual["patch_valid"], batch["patch_valid"])
    final, taken = ours.forward_intermediates(image())
    assert torch.equal(final, ours.forward_features(image()))
    assert [t.shape for t in taken] == [(2, 32, 3, 5)] * 2


def test_encodings_of_one_grid_reject_mixed_batches():
    advice = "pack samples of equal grids, or use another encoding"
    for name, match in (
        (
            "rpb",
            f"^rpb is resampled for one grid at a time, .* packs samples of several grids, got .*; {advice}",
        ),
        (
            "rpb_cpb",
            f"packs samples of different grids, but the table of rpb_cpb is computed for one .*; {advice}",
        ),
        (
            "positional_attention(table=learned)",
            r"^positional_attention computes table='learned' for one grid at a time, .* several sizes; pack samples",
        ),
        (
            "positional_attention(table=ranked)",
            r"^positional_attention computes table='ranked' for one grid at a time",
        ),
        (
            "positional_attention(table=target)",
            r"^target computes next positions for one grid at a time, .* several sizes, got .* equal grids",
        ),
    ):
        model = vispe.convert(naflex(), name)
        assert model(pack([(4, 2)] * 2)).isfinite().all()
        with pytest.raises(ShapeError, match=match):
            model(pack(SIZES))
    with pytest.raises(UnsupportedCombination, match=r"peg mixes tokens .* packs patches of several grids"):
        vispe.convert(naflex(), "peg")
    batch = pack(SIZES)
    model = vispe.convert(naflex(), "alibi2d")
    batch["patch_valid"] = batch["patch_valid"][:, :3]
    with pytest.raises(ShapeError, match=r"patch_coord must have the shape \(b, n, 2\)"):
        model._forward_embeds(**{"x": batch.pop("patches"), **batch}, attn_mask=None)


@cases(
    "spec", ["alibi2d", "learn+alibi2d", {"name": "alibi2d", "wrap": False}, [{"name": "learned"}]], ids=str
)
def test_the_factory(spec):
    options = dict(NAFLEX)
    torch.manual_seed(0)
    ours = shake(timm.create_model("naflexvit_base_patch16_gap", pos_embed=spec, **options)).eval()
    stock = timm.create_model("naflexvit_base_patch16_gap", **options).eval()
    ours.load_state_dict(stock.state_dict())
    batch = pack(SIZES)
    if spec != [{"name": "learned"}]:
        assert torch.equal(ours(batch), vispe.convert(stock, spec)(batch))
    assert ours.vispe.spec
    saved = getattr(ours, "_model_args", {}).get("pos_embed", spec)
    rebuilt = timm.create_model("naflexvit_base_patch16_gap", pos_embed=saved, **options).eval()
    rebuilt.load_state_dict(ours.state_dict())
    assert torch.equal(rebuilt(batch), ours(batch))


@cases("word", ["learned", "factorized", "none"])
def test_names_of_timm_keep_their_meaning(word):
    assert type(naflex(pos_embed=word)) is NaFlexVit


@cases("name", ["vit_tiny_patch16_224", "eva02_tiny_patch14_224"])
def test_models_that_timm_converts_to_naflex(name):
    model = timm.create_model(name, use_naflex=True, pos_embed="alibi2d", depth=1)
    assert isinstance(model, NaFlexVit)
    assert model.vispe.spec == [{"name": "alibi2d"}]
    assert model.rope is None


@cases("options", ["", ",on=qk,shared=false", ",method=cross,prefix_buckets=3", ",method=euclidean"])
def test_tables_independent_of_the_grid_support_several_sizes(options):
    model = vispe.convert(naflex(), f"irpe(mode=bias{options})")
    batch, none = pack(SIZES, tokens=17), vispe.convert(naflex(), "none")
    shake(model)
    none.load_state_dict({k: v for k, v in model.state_dict().items() if "pos_enc" not in k})
    close(model(batch), torch.cat([model(sample_of(batch, i)) for i in range(3)]))
    assert (model(batch) - none(batch)).abs().max() > 1e-3
