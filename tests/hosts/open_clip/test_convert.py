"""Image towers of open_clip with an encoding: outputs, and unchanged behaviour."""

import copy
import pickle

import pytest
import torch
from open_clip.transformer import PatchDropout, VisionTransformer

import vispe
from tests.cases import cases
from tests.hosts.helpers import close, cotangent, dense, grads, image, shake
from tests.hosts.open_clip.common import CUSTOM, TOWER, as_custom, tiny_clip, tiny_tower, tower_oracle, words
from vispe.backbones.attention_recorder import record_attention
from vispe.errors import InputError, OptionError
from vispe.hosts.open_clip.tower import ConvertedClipTower

GEOMETRIC = torch.tensor([2.0 ** (-2 * k) for k in (1, 2, 3, 4)])
WORD = "positional_embedding"


def tokens_of(tower, x):
    """Return tokens after the last block."""
    actual = tower.forward_intermediates(x, [-1], output_fmt="NLC", output_extra_tokens=True)
    return torch.cat([actual["image_intermediates_prefix"][0], actual["image_intermediates"][0]], 1)


@cases("options", [{}, {"block_type": "custom"}, CUSTOM], ids=["default", "custom", "norms"])
@cases("slopes", ["constant", "geometric"])
def test_the_bias_of_every_layer_and_its_gradients(options, slopes):
    tower = tiny_tower(**options)
    target = as_custom(tower, **options)
    slope = torch.ones(4) if slopes == "constant" else GEOMETRIC
    mask = (-slope[:, None, None] * dense(3, 5, 1))[None]
    vispe.convert(tower, f"alibi2d(slopes={slopes})")
    for fused in (True, False):
        for block in tower.transformer.resblocks:
            block.attn.fused_attn = fused
        actual = tokens_of(tower, image())
        expected = tower_oracle(target, image(), mask)
        close(actual, expected)
        theirs = grads(target, expected, WORD)
        close(grads(tower, actual), theirs)


def test_learned_slopes_differ_between_layers():
    tower = vispe.convert(tiny_tower(), "alibi2d(slopes=learned)")
    stock = vispe.restore(copy.deepcopy(tower))
    custom = as_custom(stock)
    x = custom._embeds(image())
    slopes = [b.attn.pos_enc.slope for b in tower.transformer.resblocks]
    assert not torch.equal(slopes[0], slopes[1])
    for block, slope in zip(custom.transformer.resblocks, slopes, strict=True):
        x = block(x, attn_mask=(-slope.detach()[:, None, None] * dense(3, 5, 1))[None])
    close(tokens_of(tower, image()), x)
    (tower(image()) * cotangent(torch.zeros(2, 16))).sum().backward()
    assert slopes[0].grad.abs().min() > 0
    assert tower.no_weight_decay() == {
        "class_embedding", WORD, *(f"transformer.resblocks.{i}.attn.pos_enc.slope" for i in (0, 1))
    }  # fmt: skip


def test_additive_encodings_exclude_the_class_token():
    tower = tiny_tower()
    expected = as_custom(tower, table=True)
    source = vispe.create_encoding("learned", dim=32, grid=(3, 5))
    expected.positional_embedding.data = torch.cat([torch.zeros(1, 32), source.weight.data[0]])
    vispe.convert(tower, source)
    close(tower(image()), expected(image()))
    both = vispe.convert(tiny_tower(), [source, "alibi2d"])
    close(tokens_of(both, image()), tower_oracle(expected, image(), -dense(3, 5, 1)[None, None]))


def test_mixing_runs_after_its_blocks():
    tower = vispe.convert(tiny_tower(), "peg(after=[0])")
    stock = vispe.restore(copy.deepcopy(tower))
    x = stock.transformer.resblocks[0](as_custom(stock)._embeds(image()))
    conv = tower.pos_enc.proj[0]
    figure = x[:, 1:].transpose(1, 2).unflatten(2, (3, 5))
    x = torch.cat([x[:, :1], (figure + conv(figure)).flatten(2).transpose(1, 2)], 1)
    close(tokens_of(tower, image()), stock.transformer.resblocks[1](x))


@cases("size", [(24, 40), (40, 24), (32, 32), (47, 9)])
def test_the_grid_follows_the_image_size(size):
    tower = vispe.convert(tiny_tower(), "alibi2d")
    h, w = size[0] // 8, size[1] // 8
    options = {"image_size": size}
    stock = VisionTransformer(**{**TOWER, **options, "block_type": "custom"})
    stock.load_state_dict({**tower.state_dict(), WORD: torch.zeros(1 + h * w, 32)})
    for _ in range(2):
        close(tower(image(2, 3, 24, 40)), tower(image(2, 3, 24, 40)))
        mask = -dense(h, w, 1)[None, None]
        close(tokens_of(tower, image(2, 3, *size)), tower_oracle(stock, image(2, 3, *size), mask))
    actual = tower.forward_intermediates(image(2, 3, *size))["image_intermediates"]
    assert [tuple(f.shape) for f in actual] == [(2, 32, h, w)] * 2


def test_a_stored_table_is_resampled_for_other_sizes():
    stock = tiny_tower()
    tower = vispe.convert(copy.deepcopy(stock), "none", keep_abs=True)
    assert torch.equal(tower(image()), stock(image()))
    # a constant table stays constant
    tower.positional_embedding.data[1:] = tower.positional_embedding.data[1]
    bigger = VisionTransformer(**{**TOWER, "image_size": (48, 32)}).eval()
    table = torch.cat(
        [tower.positional_embedding.data[:1], tower.positional_embedding.data[1:2].expand(24, -1)]
    )
    bigger.load_state_dict({**tower.state_dict(), WORD: table})
    close(tower(image(2, 3, 48, 32)), bigger(image(2, 3, 48, 32)))


def test_zero_shot_logits_are_unchanged_by_encodings_without_effect():
    model = tiny_clip()
    with torch.no_grad():
        expected = model.get_logits(image(), words())
    for spec in ("none", "peg.retrofit", "alibi2d(slopes=learned)", "rope_mixed"):
        ours = vispe.convert(copy.deepcopy(model), spec, keep_abs=True)
        for name, p in ours.named_parameters():
            if "pos_enc" in name:
                p.data.zero_()
        with torch.no_grad():
            actual = ours.get_logits(image(), words())
        exact = spec in ("none", "peg.retrofit")
        for f, w in zip(actual, expected, strict=True):
            assert torch.equal(f, w) if exact else torch.allclose(f, w, rtol=1e-5, atol=1e-5)
    changed = vispe.convert(copy.deepcopy(model), "alibi2d", keep_abs=True).get_logits(image(), words())[0]
    assert (changed - expected[0]).abs().max() > 1e-3


def test_the_text_tower_is_untouched():
    model = tiny_clip()
    before = [(n, type(m)) for n, m in model.named_modules() if not n.startswith("visual")]
    text = model.encode_text(words())
    vispe.convert(model, "alibi2d(slopes=learned)+learned")
    assert [(n, type(m)) for n, m in model.named_modules() if not n.startswith("visual")][1:] == before[1:]
    assert torch.equal(model.encode_text(words()), text)


def test_restore_recovers_the_stock_model():
    stock = tiny_clip()
    expected, weights = stock.encode_image(image()), stock.state_dict()
    classes = {n: type(m) for n, m in stock.named_modules()}
    model = copy.deepcopy(stock)
    for spec in ("alibi2d", "learned", "alibi2d(slopes=learned)+sincos2d", "none"):
        vispe.convert(model, spec)  # one after the other, without restoring
        assert not torch.equal(model.encode_image(image()), expected)
    vispe.convert(model.visual, "alibi2d(slopes=learned)")
    model.visual.transformer.resblocks[0].attn.fused_attn = False
    vispe.restore(model)
    assert torch.equal(model.encode_image(image()), expected)
    assert {n: type(m) for n, m in model.named_modules()} == classes
    assert set(model.state_dict()) == set(weights)
    assert all(
        vars(a).keys() == vars(b).keys() for a, b in zip(model.modules(), stock.modules(), strict=True)
    )
    with pytest.raises(vispe.VispeError, match="got open_clip VisionTransformer without an encoding"):
        vispe.restore(model)


def test_keep_abs_restores_a_stored_table():
    stock = tiny_tower()
    tower = vispe.convert(copy.deepcopy(stock), "alibi2d")
    vispe.convert(tower, "learn+none")
    assert torch.equal(tower(image()), stock(image()))


@cases("spec", ["alibi2d", "alibi2d(slopes=learned)", "learned", "learned+alibi2d(slopes=learned)"])
def test_stock_weights_load_strictly_before_and_after(spec):
    weights = {k: v.clone() for k, v in shake(tiny_clip(), 5).state_dict().items()}
    before, after = tiny_clip(), vispe.convert(tiny_clip(), spec)
    before.load_state_dict(weights)
    vispe.convert(before, spec)
    encodings = {k: v.clone() for k, v in after.state_dict().items() if "pos_enc" in k}
    result = after.load_state_dict(weights)
    assert not result.missing_keys
    assert not result.unexpected_keys
    now = after.state_dict()
    assert all(torch.equal(now[k], v) for k, v in encodings.items()), "the encoding keeps its values"
    before.load_state_dict({**before.state_dict(), **encodings})
    assert torch.equal(before.encode_image(image()), after.encode_image(image()))
    assert f"visual.{WORD}" in weights, "the caller's dict is left alone"
    remaining = vispe.convert(tiny_clip(), spec, keep_abs=True)
    remaining.load_state_dict(weights)
    assert torch.equal(remaining.visual.positional_embedding, weights[f"visual.{WORD}"])


def test_checkpoints_of_converted_towers_load_strictly_and_partial_ones_raise():
    spec = "learned+alibi2d(slopes=learned)"
    source = shake(vispe.convert(tiny_clip(), spec), 4)
    weights = source.state_dict()
    ours = vispe.convert(tiny_clip(), spec)
    ours.load_state_dict(weights)
    assert torch.equal(ours.encode_image(image()), source.encode_image(image()))
    missing_key = "visual.transformer.resblocks.1.attn.pos_enc.slope"
    with pytest.raises(RuntimeError, match=f'Missing key.*"{missing_key}"'):
        ours.load_state_dict({k: v for k, v in weights.items() if k != missing_key})
    with pytest.raises(RuntimeError, match=f"Unexpected key.*{WORD}"):
        ours.load_state_dict({**weights, f"visual.{WORD}": torch.zeros(16, 32)})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*pos_enc"):
        tiny_clip().load_state_dict(weights)


def test_released_slopes_load_by_name():
    ours = vispe.convert(tiny_tower(), "alibi2d(slopes=learned)")
    weights = {k: v for k, v in tiny_tower().state_dict().items() if k != WORD}
    weights |= {f"transformer.resblocks.{i}.attn.m": torch.full((4, 1, 1), i + 0.5) for i in (0, 1)}
    ours.load_state_dict(weights)
    assert [b.attn.pos_enc.slope.tolist() for b in ours.transformer.resblocks] == [[0.5] * 4, [1.5] * 4]


@cases("options", [{}, {"block_type": "custom"}], ids=["default", "custom"])
@cases("spec", ["alibi2d(slopes=learned)", "learned", "sincos2d+alibi2d", "rope_mixed+peg"])
def test_checkpointing_changes_no_gradient(options, spec):
    tower = vispe.convert(tiny_tower(**options), spec).train()
    expected = grads(tower, tower(image()), "-")
    tower.set_grad_checkpointing()
    runs = []
    tower.transformer.resblocks[0].ln_1.register_forward_hook(lambda *_: runs.append(1))
    out = tower(image())
    tower(image(1, 3, 40, 24))  # a grid of the same number of tokens in between
    actual = grads(tower, out, "-")
    assert len(runs) == 3, "the block ran again for the gradient"
    assert all(torch.equal(actual[n], expected[n]) for n in expected)


def test_patch_dropout_drops_the_coordinates_too():
    tower = tiny_tower(patch_dropout=0.4)
    custom = as_custom(tower, patch_dropout=0.4)
    vispe.convert(tower, "alibi2d(slopes=geometric)")
    mask = (-GEOMETRIC[:, None, None] * dense(3, 5, 1))[None]
    close(tokens_of(tower, image()), tower_oracle(custom, image(), mask))  # nothing is dropped in eval mode
    tower.train()
    torch.manual_seed(11)
    keep = torch.randn(2, 15).topk(9, dim=-1).indices + 1
    keep = torch.cat([torch.zeros(2, 1, dtype=torch.long), keep], 1)
    per_image = torch.stack([mask[0][:, k][:, :, k] for k in keep])
    torch.manual_seed(11)
    actual = tokens_of(tower, image())
    close(actual, tower_oracle(custom, image(), per_image, keep))


def test_patch_dropout_uses_the_random_numbers_of_open_clip():
    stock = tiny_tower(patch_dropout=0.5)
    ours = vispe.convert(copy.deepcopy(stock), "none", keep_abs=True).train()
    stock.train()
    torch.manual_seed(2)
    expected = stock(image())
    torch.manual_seed(2)
    assert torch.equal(ours(image()), expected)


POOLS = [
    {"pool_type": "avg"},
    {"pool_type": "none"},
    {"pool_type": "avg", "final_ln_after_pool": True},
    {"attentional_pool": True, "attn_pooler_heads": 2, "attn_pooler_queries": 5},
    {"attentional_pool": "parallel", "attn_pooler_heads": 2, "attn_pooler_queries": 5, "output_dim": 32},
    {"attentional_pool": "cascade", "attn_pooler_heads": 2, "attn_pooler_queries": 5, "output_dim": 32},
    {"no_ln_pre": True, "ls_init_value": 0.5},
]


@cases("options", POOLS, ids=lambda o: "-".join(map(str, o.values())))
def test_pooling_reads_the_tokens_of_the_blocks(options):
    stock = tiny_tower(output_tokens=True, **options)
    ours = vispe.convert(copy.deepcopy(stock), "none", keep_abs=True)
    for actual, expected in zip(ours(image()), stock(image()), strict=True):
        assert torch.equal(actual, expected)
    ours = vispe.convert(copy.deepcopy(stock), "alibi2d")
    tokens = tower_oracle(as_custom(stock, **options), image(), -dense(3, 5, 1)[None, None])
    pooled, remaining = stock._pool(tokens)
    for actual, expected in zip(ours(image()), (pooled @ stock.proj, remaining), strict=True):
        close(actual, expected)
    assert type(ours.attn_pool) is type(stock.attn_pool)


@cases("indices", [None, 1, [0], [-1, 0]])
@cases("stop_early", [False, True])
@cases("fmt", ["NCHW", "NLC"])
def test_forward_intermediates_equals_open_clip(indices, stop_early, fmt):
    stock = tiny_tower()
    ours = vispe.convert(copy.deepcopy(stock), "none", keep_abs=True)
    for only in (False, True):
        arguments = {
            "indices": indices, "stop_early": stop_early, "normalize_intermediates": only, "intermediates_only": only,
            "output_fmt": fmt, "output_extra_tokens": not only,
        }  # fmt: skip
        expected, actual = (m.forward_intermediates(image(), **arguments) for m in (stock, ours))
        assert list(actual) == list(expected)
        for key in expected:
            pairs = zip(actual[key], expected[key], strict=True)
            assert all(torch.equal(f, w) for f, w in pairs), key


def test_forward_intermediates_agrees_with_forward_and_rejects_invalid_arguments():
    tower = vispe.convert(tiny_clip(), "alibi2d").visual
    out = tower.forward_intermediates(image(), normalize_intermediates=True, output_extra_tokens=True)
    assert torch.equal(out["image_features"], tower(image()))
    close(out["image_intermediates_prefix"][-1][:, 0] @ tower.proj, tower(image()))
    with pytest.raises(OptionError, match="output_fmt must be NCHW or NLC, got 'NHWC'"):
        tower.forward_intermediates(image(), output_fmt="NHWC")
    with pytest.raises(
        OptionError, match=r"indices must select some of the 2 blocks of the tower, got \[2\]"
    ):
        tower.forward_intermediates(image(), [2])
    tower.prune_intermediate_layers([0])
    assert len(tower.forward_intermediates(image(), intermediates_only=True)["image_intermediates"]) == 1
    assert tower(image()).shape == (2, 32)


@cases("spec", ["alibi2d(slopes=learned)", "learned+alibi2d", "none"])
def test_copies_and_pickles(spec):
    model = vispe.convert(tiny_clip(), spec)
    expected = model.encode_image(image())
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied.encode_image(image()), expected)
        assert isinstance(copied.visual, ConvertedClipTower)
        assert vispe.describe(copied) == vispe.describe(model)
        assert torch.equal(vispe.restore(copied).encode_image(image()), tiny_clip().encode_image(image()))


def test_describe():
    model = vispe.convert(tiny_clip(), "learned+alibi2d(slopes=learned)")
    model.visual.transformer.resblocks[1].attn.fused_attn = False
    text = vispe.describe(model)
    assert text.splitlines() == [
        "visual: open_clip VisionTransformer with {'name': 'learned'} + {'name': 'alibi2d', 'slopes': 'learned'}",
        "  grid (3, 5), trained at (3, 5), 1 prefix token",
        "  absolute table: removed",
        "  pos_enc: learned, 480 parameters",
        "  2 attention layers with their own: alibi2d, 8 parameters",
        "  2 attention layers swapped; backend reference (fused attention is off)",
    ]
    assert "in use" in vispe.describe(vispe.convert(tiny_tower(), "alibi2d", keep_abs=True))
    assert vispe.describe(tiny_clip()).startswith("CLIP without an encoding of vispe")


@cases("groups", [0, 1, 2, 3, 4, 9])
def test_lock_freezes_the_groups_of_open_clip_with_the_encodings_in_them(groups):
    stock, ours = tiny_clip(), vispe.convert(tiny_clip(), "learned+alibi2d(slopes=learned)")
    stock.lock_image_tower(groups)
    ours.lock_image_tower(groups)
    expected = {n: p.requires_grad for n, p in stock.named_parameters() if not n.endswith(f"visual.{WORD}")}
    actual = {n: p.requires_grad for n, p in ours.named_parameters() if "pos_enc" not in n}
    assert actual == expected
    assert ours.visual.positional_embedding is None
    assert ours.visual.pos_enc.weight.requires_grad == stock.visual.class_embedding.requires_grad
    for mine, theirs in zip(
        ours.visual.transformer.resblocks, stock.visual.transformer.resblocks, strict=True
    ):
        assert mine.attn.pos_enc.slope.requires_grad == theirs.attn.in_proj_weight.requires_grad


def test_lock_keeps_frozen_parameters_frozen():
    tower = vispe.convert(tiny_tower(), "learned")
    tower.pos_enc.weight.requires_grad_(False)
    tower.vispe.fixed = ("pos_enc.weight",)
    tower.lock(9)
    assert not tower.pos_enc.weight.requires_grad
    assert tower.class_embedding.requires_grad


def test_half_precision_casts_last():
    from open_clip.model import convert_weights_to_lp

    model = vispe.convert(tiny_clip(), "alibi2d(slopes=learned)")
    expected = model.encode_image(image())
    convert_weights_to_lp(model, torch.bfloat16)
    assert model.visual.transformer.resblocks[0].attn.in_proj_weight.dtype == torch.bfloat16
    actual = model.encode_image(image().bfloat16())
    assert actual.dtype == torch.bfloat16
    assert (actual.float() - expected).abs().max() < 0.05 * expected.abs().max()
    pure = vispe.convert(tiny_tower(), "learned+alibi2d").bfloat16()
    assert pure(image().bfloat16()).dtype == torch.bfloat16


def test_double_precision_and_dtype_of_the_new_parameters():
    tower = vispe.convert(tiny_tower().double(), "alibi2d(slopes=learned)")
    assert tower.transformer.resblocks[0].attn.pos_enc.slope.dtype == torch.float64
    single = vispe.convert(tiny_tower(), "alibi2d(slopes=learned)")
    single.load_state_dict({k: v.float() for k, v in tower.state_dict().items()})
    close(single(image()), tower(image().double()).float())


def test_meta_device_and_assign():
    with torch.device("meta"):
        empty = vispe.convert(VisionTransformer(**TOWER), "alibi2d(slopes=learned)").eval()
    assert all(p.is_meta for p in empty.parameters())
    source = vispe.convert(tiny_tower(), "alibi2d(slopes=learned)")
    empty.load_state_dict(source.state_dict(), assign=True)
    assert torch.equal(empty(image()), source(image()))


@pytest.mark.slow
def test_compiles_in_one_graph():
    tower = vispe.convert(tiny_tower(), "alibi2d(slopes=learned)+sincos2d")
    compiled = torch.compile(tower, backend="eager", fullgraph=True)
    for size in ((24, 40), (40, 24)):
        close(compiled(image(2, 3, *size)), tower(image(2, 3, *size)))


def test_attention_of_the_encoding_needs_positions():
    ours = vispe.convert(tiny_tower(), "alibi2d")
    x, mask = torch.randn(2, 16, 32), torch.randn(16, 16)
    for block in ours.transformer.resblocks:
        for sample in (None, mask):
            with pytest.raises(InputError, match="needs positions"):
                block(x, attn_mask=sample)


def test_attention_dropout_in_training_only():
    tower = vispe.convert(tiny_tower(block_type="custom"), "alibi2d")
    expected = tower(image())
    for block in tower.transformer.resblocks:
        block.attn.attn_drop.p = 0.5
    assert torch.equal(tower(image()), expected)
    assert not torch.equal(tower.train()(image()), expected)
    assert isinstance(tower.patch_dropout, torch.nn.Identity | PatchDropout)


@cases("spec", ["alibi2d", "rope_mixed", "irpe", "rpb"])
@cases("average", [True, False])
def test_requested_attention_weights_equal_float64(spec, average):
    tower = vispe.convert(tiny_tower(), spec)
    expected, actual = [], []

    def append_expected(recorded) -> None:
        call = recorded.call
        q, k, _ = call.transformed()
        logits = (q.double() * q.shape[-1] ** -0.5) @ k.double().transpose(-1, -2)
        bias = None if call.bias is None else call.bias.dense(q=call.q, k=call.k, scale=call.factor).double()
        maps = (logits if bias is None else logits + bias).softmax(-1).expand(2, -1, -1, -1)
        expected.append(maps.mean(1) if average else maps)

    def request_weights(module, args, kwargs):
        return args, {**kwargs, "need_weights": True, "average_attn_weights": average}

    record_attention(tower, image(), append_expected)
    before = tower(image())
    for block in tower.transformer.resblocks:
        block.attn.register_forward_pre_hook(request_weights, with_kwargs=True)
        block.attn.register_forward_hook(lambda module, args, out: actual.append(out[1]))
    close(tower(image()), before)
    for ours, exact in zip(actual, expected, strict=True):
        close(ours.double(), exact, tol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "options", [{}, {"block_type": "custom"}, CUSTOM], ids=["default", "custom", "norms"]
)
@pytest.mark.parametrize("spec", ["alibi2d(slopes=learned)", "rope_mixed", "irpe", "peg", "learn+sincos2d"])
def test_graphs_of_fx_and_jit_equal_the_tower(spec, options):
    tower = vispe.convert(tiny_tower(**options), spec)
    graph = torch.fx.symbolic_trace(tower)
    for size in ((2, 3, 24, 40), (1, 3, 40, 16)):
        assert torch.equal(graph(image(*size)), tower(image(*size)))
    close(grads(graph, graph(image()), drop=WORD), grads(tower, tower(image()), drop=WORD))
    # the graph of a stock tower of open_clip differs between two traces, which the check of torch refuses
    traced = torch.jit.trace(tower, image(), check_trace=False)
    close(traced(image(4, 3, 24, 40, seed=5)), tower(image(4, 3, 24, 40, seed=5)))
    with pytest.raises(RuntimeError, match="size of the tensor"):
        traced(image(1, 3, 40, 24))
