"""VideoMAE, V-JEPA 2 and SigLIP 2: cells of videos, and patches of images with different grids."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings

import pytest
import torch

import vispe
from tests.cases import cases
from tests.hosts.helpers import cotangent, shake
from tests.hosts.transformers.tiny import transformers
from tests.hosts.transformers.vision.oracle import close
from vispe.errors import ShapeError, UnsupportedCombination, UnsupportedHost
from vispe.hosts.transformers.vision.convert import vision_tower_of
from vispe.hosts.transformers.vision.families import attentions

SLOPES = torch.tensor([[0.7, 1.9], [1.7, 2.9]], dtype=torch.float64)
COMMON = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
VIDEO_KINDS = ("VideoMAEModel", "VJEPA2Model")
HEADS = ("VideoMAEForVideoClassification", "VideoMAEForPreTraining", "VJEPA2ForVideoClassification")
EVERY = (*VIDEO_KINDS, "Siglip2VisionModel")


def build(name, attention="sdpa"):
    """Return a random model in double precision; videos of 4 frames of 16 x 16, 2 x 4 x 4 cells."""
    if name.startswith("VideoMAE"):
        config = transformers.VideoMAEConfig(
            image_size=16, patch_size=4, num_frames=4, tubelet_size=2, intermediate_size=48, num_labels=3,
            decoder_num_attention_heads=2, decoder_hidden_size=32, decoder_num_hidden_layers=1,
            decoder_intermediate_size=48, **COMMON,
        )  # fmt: skip
    elif name.startswith("VJEPA2"):
        config = transformers.VJEPA2Config(
            crop_size=16, patch_size=4, frames_per_clip=4, tubelet_size=2, mlp_ratio=1.5, num_labels=3,
            pred_hidden_size=24, pred_num_attention_heads=2, pred_num_hidden_layers=1, pred_num_mask_tokens=2,
            drop_path_rate=0.0, num_pooler_layers=1, **COMMON,
        )  # fmt: skip
    else:
        config = transformers.Siglip2VisionConfig(
            patch_size=4, num_patches=16, intermediate_size=48, num_channels=3, **COMMON
        )
    torch.manual_seed(0)
    model = getattr(transformers, name)(config)
    model.set_attn_implementation(attention)
    return shake(model).double().eval()


def inputs(name, frames=4, height=16, width=16):
    """Return two videos; for SigLIP 2, images of 3 x 5 and 2 x 4 patches."""
    generator = torch.Generator().manual_seed(1)
    if name.startswith("Siglip2"):
        shapes = torch.tensor([[3, 5], [2, 4]])
        mask = (torch.arange(16) < shapes.prod(1)[:, None]).long()
        pixels = torch.randn(2, 16, 48, generator=generator).double()
        return {"pixel_values": pixels, "pixel_attention_mask": mask, "spatial_shapes": shapes}
    key = "pixel_values" if name.startswith("VideoMAE") else "pixel_values_videos"
    sample = {key: torch.randn(2, frames, 3, height, width, generator=generator).double()}
    if name.startswith("VJEPA2"):
        sample["skip_predictor"] = True
    return sample


def far(t, h, w):
    """Return distances between all cells."""
    cells = [(i, y, x) for i in range(t) for y in range(h) for x in range(w)]
    rows = [[sum((a - b) ** 2 for a, b in zip(p, q, strict=True)) ** 0.5 for q in cells] for p in cells]
    return torch.tensor(rows, dtype=torch.float64)


def by_hand(model, biases):
    """Make every attention layer add its bias (b or 1, h, n, n) to the logits explicitly."""
    number = {id(module): i for i, (_, _, module) in enumerate(attentions(vision_tower_of(model)))}

    def attend(module, query, key, value, attention_mask, scaling=None, **_):
        logits = query @ key.mT * scaling
        if id(module) in number:
            logits = logits + biases[number[id(module)]]
        if attention_mask is not None:
            recorded = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
            logits = logits.masked_fill(~recorded, float("-inf"))
        weights = logits.softmax(-1)
        return (weights @ value).transpose(1, 2), weights

    transformers.AttentionInterface.register("by_hand", attend)
    masks = transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    transformers.AttentionMaskInterface.register("by_hand", masks["sdpa"])
    model.set_attn_implementation("by_hand")
    return model


def without_positions(model):
    """Return a stock model without table and rotation."""
    tower = vision_tower_of(model)
    if hasattr(tower, "embeddings") and hasattr(tower.embeddings, "position_embeddings"):
        tower.embeddings.position_embeddings = torch.zeros_like(tower.embeddings.position_embeddings)
    elif hasattr(tower, "embeddings"):
        tower.embeddings.position_embedding.weight.data.zero_()
    else:
        for block in tower.encoder.layer:
            block.attention.apply_rotary_embeddings = lambda qk, _: qk
    return model


def biases(name, slopes, sample):
    """Return -distance of all present tokens, scaled by the slopes."""
    if not name.startswith("Siglip2"):
        pixels = next(v for k, v in sample.items() if k.startswith("pixel_values"))
        distance = far(pixels.shape[1] // 2, pixels.shape[3] // 4, pixels.shape[4] // 4)[None]
    else:
        distance = torch.zeros(2, 16, 16, dtype=torch.float64)
        for i, (h, w) in enumerate(sample["spatial_shapes"].tolist()):
            distance[i, : h * w, : h * w] = far(1, h, w)
    return [-distance[:, None] * s[:, None, None] for s in slopes]


def spec_of(name, slopes=True):
    word = "alibi2d" if name.startswith("Siglip2") else "alibi3d"
    return f"{word}(slopes=learned,normalize=none,wrap=false)" if slopes else word


def set_slopes(model, slopes):
    with torch.no_grad():
        for i, _, attn in attentions(vision_tower_of(model)):
            attn.pos_enc.slope.copy_(slopes[i])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["plain", "checkpoint"])
@pytest.mark.parametrize("name", EVERY)
def test_slopes_and_their_gradients_equal_explicit_attention(name, mode):
    ours, stock = vispe.convert(build(name), spec_of(name)), without_positions(build(name))
    slopes = SLOPES.clone().requires_grad_()
    set_slopes(ours, SLOPES)
    if mode == "checkpoint":
        ours.train()
        ours.gradient_checkpointing_enable()
    sizes = [{}] if name != "VJEPA2Model" else [{}, {"frames": 6, "height": 12, "width": 20}, {}]
    for size in sizes:  # another size, and the first again
        sample = inputs(name, **size)
        actual = ours(**sample).last_hidden_state
        expected = by_hand(stock, biases(name, slopes, sample))(**sample).last_hidden_state
        if name.startswith("Siglip2"):  # what stands in padding is not read
            valid = sample["pixel_attention_mask"].bool()
            actual, expected = actual[valid], expected[valid]
        close(actual, expected, 1e-6)
        towards = cotangent(actual, 3)
        names, parameters = zip(
            *((n, p) for n, p in stock.named_parameters() if "table" not in n), strict=True
        )
        grads = torch.autograd.grad(
            (expected * towards).sum(), (slopes, *parameters), retain_graph=True, allow_unused=True
        )
        ours.zero_grad()
        (actual * towards).sum().backward()
        layers = [attn for _, _, attn in attentions(vision_tower_of(ours))]
        close(torch.stack([attn.pos_enc.slope.grad for attn in layers]), grads[0], 1e-6)
        mine = dict(ours.named_parameters())
        for n, g in zip(names, grads[1:], strict=True):
            if g is not None and n in mine and "position_embedding" not in n:
                close(mine[n].grad, g, 1e-6)


@cases("spec", ["tra", "lookhere"])
@cases("attention", ["sdpa", "eager"])
def test_padding_after_the_patches_of_an_image_has_no_effect(attention, spec):
    """With `tra`, a query may keep no key of its image: the lowest number in a mask must not keep padding."""
    model = vispe.convert(build("Siglip2VisionModel", attention), spec)
    shapes = torch.tensor([[1, 2], [2, 2]])
    mask = (torch.arange(16) < shapes.prod(1)[:, None]).long()
    pixels = inputs("Siglip2VisionModel")["pixel_values"]
    with torch.no_grad():
        padded = model(pixels, mask, shapes).last_hidden_state
        for i, n in enumerate(mask.sum(1).tolist()):
            unpadded = model(pixels[i : i + 1, :n], mask[i : i + 1, :n], shapes[i : i + 1]).last_hidden_state
            close(padded[i : i + 1, :n], unpadded, 1e-9)


@cases("name", [*EVERY, *HEADS])
def test_conversion_copies_and_restoring_are_bit_exact(name):
    model, sample = build(name), inputs(name)
    if name.endswith("PreTraining"):
        sample["bool_masked_pos"] = torch.arange(32).remainder(2).bool().expand(2, -1)
    sample.pop("skip_predictor", None)

    def outputs(m):
        torch.manual_seed(0)
        out = m(**sample)
        return out.last_hidden_state if "last_hidden_state" in out else out.logits

    before, keys, signature = outputs(model), list(model.state_dict()), inspect.signature(type(model).forward)
    vispe.convert(model, spec_of(name, False))
    converted = outputs(model)
    assert not torch.equal(converted, before)
    assert inspect.signature(type(model).forward) == signature
    assert torch.equal(outputs(copy.deepcopy(model)), converted)
    assert torch.equal(outputs(pickle.loads(pickle.dumps(model))), converted)
    vispe.restore(model)
    assert list(model.state_dict()) == keys
    assert torch.equal(outputs(model), before)


@cases("name", EVERY)
def test_stored_tables_and_rotations_equal_stock(name):
    options = {"keep_rope": True} if name == "VJEPA2Model" else {"keep_abs": True}
    model, sample = build(name), inputs(name)
    before = model(**sample).last_hidden_state
    vispe.convert(model, spec_of(name), **options)
    set_slopes(model, torch.zeros(2, 2))
    close(model(**sample).last_hidden_state, before, 1e-12)


@cases("name", EVERY)
def test_weights_and_encoding_are_saved_and_loaded(name, tmp_path):
    model, sample = build(name).float(), inputs(name)
    sample = {k: v.float() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in sample.items()}
    vispe.convert(model, spec_of(name))
    set_slopes(model, SLOPES.float())
    with warnings.catch_warnings(action="ignore"):
        model.save_pretrained(tmp_path)
    auto = getattr(transformers, name) if name.startswith("Siglip2") else transformers.AutoModel
    actual = vispe.from_pretrained(auto, tmp_path).eval()
    assert torch.equal(actual(**sample).last_hidden_state, model(**sample).last_hidden_state)
    stock = build(name).float()
    model.load_state_dict(stock.state_dict())  # strictly; the encoding keeps its values
    assert torch.equal(attentions_of(model)[0].pos_enc.slope.data, SLOPES[0].float())


def attentions_of(model):
    return [attn for _, _, attn in attentions(vision_tower_of(model))]


def test_visible_cells_keep_their_positions():
    """VideoMAE omits cells; the others keep frame, row and column."""
    ours, stock = (
        vispe.convert(build("VideoMAEModel"), spec_of("VideoMAEModel")),
        without_positions(build("VideoMAEModel")),
    )
    set_slopes(ours, SLOPES)
    sample = inputs("VideoMAEModel")
    order = torch.stack([torch.randperm(32, generator=torch.Generator().manual_seed(s)) for s in (0, 1)])
    sample["bool_masked_pos"] = order < 19
    remaining = torch.stack([(~m).nonzero()[:, 0] for m in sample["bool_masked_pos"]])
    distances = far(2, 4, 4)
    distance = torch.stack([distances[k][:, k] for k in remaining])
    by_hand(stock, [-distance[:, None] * s[:, None, None] for s in SLOPES])
    close(ours(**sample).last_hidden_state, stock(**sample).last_hidden_state, 1e-6)


def test_the_rotation_of_v_jepa_follows_the_selected_cells():
    stock = build("VJEPA2Model")
    model = vispe.convert(copy.deepcopy(stock), "rope+alibi3d(slopes=learned)")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "pos_enc" in name:
                p.zero_()
        tokens = stock.encoder.embeddings(inputs("VJEPA2Model")["pixel_values_videos"])
        cells = torch.arange(1, tokens.shape[1], 2).expand(len(tokens), -1)
        x = tokens[:, 1::2]
        side = model.config.crop_size // model.config.patch_size
        grid = (tokens.shape[1] // side**2, side, side)
        with vispe.positions_for(model, grid, index=cells):
            actual = model.encoder.layer[0](x, cells)[0]
        torch.testing.assert_close(actual, stock.encoder.layer[0](x, cells)[0], rtol=0, atol=1e-9)


def test_the_predictor_of_v_jepa_is_unchanged():
    model = vispe.convert(build("VJEPA2Model"), "alibi3d")
    sample = inputs("VJEPA2Model") | {"skip_predictor": False}
    out = model(**sample)
    stock = build("VJEPA2Model")
    cells = torch.arange(32).expand(2, -1)
    expected = stock.predictor(
        encoder_hidden_states=out.last_hidden_state, context_mask=[cells], target_mask=[cells]
    )
    close(out.predictor_output.last_hidden_state, expected.last_hidden_state, 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("width", [24, 36, 60])
def test_the_preset_of_v_jepa_equals_the_stock_model(width, heads):
    """Head widths that are and are not multiples of 4 and 6, with channels that are not rotated."""
    config = copy.deepcopy(build("VJEPA2Model").config)
    config.hidden_size, config.num_attention_heads = width, heads
    torch.manual_seed(3)
    stock = shake(transformers.VJEPA2Model(config)).double().eval()
    ours = vispe.convert(copy.deepcopy(stock), "rope_axial.vjepa2")
    for frames in (4, 10):  # transformers counts rows of the built size, so the size of frames is that
        sample = inputs("VJEPA2Model", frames)
        pixels = sample["pixel_values_videos"].requires_grad_()
        sides = []
        for model in (ours, stock):
            out = model(**sample).last_hidden_state
            sides.append((out, torch.autograd.grad((out * cotangent(out)).sum(), pixels)[0]))
        for parameters, theirs in zip(*sides, strict=True):
            close(parameters, theirs, 1e-5)


def test_describe_names_the_encoding_that_equals_the_rotation_of_v_jepa():
    model = build("VJEPA2Model")
    assert "equals 'rope_axial.vjepa2'." in vispe.describe(model)
    model.config.use_rope_interleave = True
    assert "equals 'rope_axial.vjepa21(schedule=none)'." in vispe.describe(model)
    model.config.interpolate_rope = True
    assert "equals 'rope_axial.vjepa21(reference=[1,16,16])'." in vispe.describe(model)
    vispe.create_encoding("rope_axial.vjepa21(reference=[1,16,16])", dim=24, num_heads=2)
    model.config.patch_size = 14
    assert "reference=[1,18,18]" in vispe.describe(model)
    model.config.use_rope_interleave = False
    assert "'rope_axial.vjepa2(schedule=align_corners,reference=[1,18,18])'" in vispe.describe(model)
    assert "'alibi3d') adds one." in vispe.describe(build("VideoMAEModel"))


@cases("name", EVERY)
def test_eager_attention_returns_its_weights(name):
    model, sample = vispe.convert(build(name, "eager"), spec_of(name, False)), inputs(name)
    out = model(**sample, output_attentions=True)
    assert len(out.attentions) == 2
    close(out.attentions[0].sum(-1), torch.ones(out.attentions[0].shape[:3]).double(), 1e-12)
    for weights in out.attentions:
        weights.retain_grad()
    out.last_hidden_state.square().sum().backward()
    assert all(weights.grad.abs().max() > 0 for weights in out.attentions)
    fused = vispe.convert(build(name), spec_of(name, False))(**sample).last_hidden_state
    valid = sample.get("pixel_attention_mask", torch.ones(fused.shape[:2])).bool()
    close(out.last_hidden_state[valid], fused[valid], 1e-6)


@pytest.mark.compiles
@pytest.mark.slow
@pytest.mark.parametrize("name", VIDEO_KINDS)
def test_a_compiled_model_equals_eager(name):
    model, sample = vispe.convert(build(name), spec_of(name)), inputs(name)
    compiled = torch.compile(model, backend="aot_eager")
    close(compiled(**sample).last_hidden_state, model(**sample).last_hidden_state, 1e-12)


@cases("spec", ["lookhere", "alibi2d"])
def test_encodings_of_two_axes_are_rejected_for_videos(spec):
    model = build("VideoMAEModel")
    before = model(**inputs("VideoMAEModel")).last_hidden_state
    with pytest.raises((UnsupportedCombination, ShapeError)):
        vispe.convert(model, spec)
    assert torch.equal(model(**inputs("VideoMAEModel")).last_hidden_state, before)


def test_tables_are_rejected_for_several_grids():
    model = vispe.convert(build("Siglip2VisionModel"), "rpb")
    with pytest.raises(ShapeError, match="one grid at a time"):
        model(**inputs("Siglip2VisionModel"))


@cases("name", EVERY)
def test_classes_of_layers_that_are_replaced_after_the_conversion_are_refused(name):
    model = vispe.convert(build(name), spec_of(name, False))
    (_, _, layer), *_ = attentions(vision_tower_of(model))
    layer.__class__ = type(layer).vispe_stock
    with pytest.raises(UnsupportedHost, match="its class was replaced"):
        model(**inputs(name))
