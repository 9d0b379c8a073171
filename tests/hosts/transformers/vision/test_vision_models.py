"""Vision models of transformers, such as ViT, DINOv2, DINOv3 and MAE, against dense attention."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings

import pytest
import torch

import vispe
from tests.cases import cases
from tests.hosts.helpers import cotangent, dense
from tests.hosts.transformers.tiny import transformers
from tests.hosts.transformers.vision.oracle import close
from tests.hosts.transformers.vision.vision_models import (
    BACKBONES,
    HEADS,
    MODELS,
    build,
    by_hand,
    inputs,
    outputs,
    stem,
    visible_tokens,
    without_tables,
)
from tests.products import partly
from vispe.errors import UnsupportedCombination
from vispe.hosts.transformers.vision.convert import vision_tower_of
from vispe.hosts.transformers.vision.families import attentions

SLOPES = torch.tensor([[0.7, 1.9], [1.7, 2.9]], dtype=torch.float64)
EVERY = (*MODELS, *BACKBONES, *HEADS)


def masks_of(name, sample, slopes):
    """Return -distance of all present tokens, scaled by the slopes, for every block."""
    h, w = (size // 4 for size in sample["pixel_values"].shape[-2:])
    prefix = MODELS[f"{stem(name)}Model"]
    distances = dense(h, w, prefix).double()
    keep = visible_tokens(name, sample, prefix)
    if keep is not None:
        distances = torch.stack([distances[k][:, k] for k in keep])[:, None]
    return [-distances * s[:, None, None] for s in slopes]


@partly(1)
@cases("mode", ["plain", "checkpoint", "reentrant"])
@cases("name", MODELS)
def test_slopes_and_their_gradients_equal_dense_attention(name, mode):
    ours, stock = build(name), without_tables(build(name))
    vispe.convert(ours, "alibi2d(slopes=learned)")
    slopes = SLOPES.clone().requires_grad_()
    with torch.no_grad():
        for i, _, attn in attentions(ours):
            attn.pos_enc.slope.copy_(slopes[i])
    if mode != "plain":
        ours.train()
        ours.gradient_checkpointing_enable({"use_reentrant": mode == "reentrant"})
    for size in ((16, 16), (12, 28), (16, 16)):  # another size, and the first again
        sample = inputs(name, *size)
        ours.zero_grad()
        slopes.grad = None
        images = [sample["pixel_values"].clone().requires_grad_() for _ in range(2)]
        actual = ours(**sample | {"pixel_values": images[0]}, output_hidden_states=True)
        by_hand(stock, masks_of(name, sample, slopes))
        expected = stock(**sample | {"pixel_values": images[1]}, output_hidden_states=True)
        for a, b in zip(actual.hidden_states, expected.hidden_states, strict=True):
            close(a, b, 1e-6)
        for out in (actual.last_hidden_state, expected.last_hidden_state):
            out.backward(cotangent(out))
        close(actual.last_hidden_state, expected.last_hidden_state, 1e-6)
        close(images[0].grad, images[1].grad, 1e-6)
        for i, _, attn in attentions(ours):
            close(attn.pos_enc.slope.grad, slopes.grad[i], 1e-6)


@partly(12)
@cases("name", EVERY)
def test_conversion_and_restoring_are_bit_exact(name):
    model = build(name)
    stock, sample = copy.deepcopy(model), inputs(name)
    types, names = [type(m) for m in model.modules()], list(model.state_dict())
    before = outputs(model, sample)
    vispe.convert(model, "none", keep_abs="DINOv3" not in name, keep_rope="DINOv3" in name)
    for a, b in zip(outputs(model, sample), before, strict=True):
        close(a, b, 1e-12)  # all that it has of its own is retained
    vispe.convert(model, "alibi2d(slopes=learned)+irpe")
    after = outputs(model, sample)
    assert max((a - b).abs().max() for a, b in zip(after, before, strict=True)) > 1e-3
    assert "alibi2d" in vispe.describe(model)
    model.load_state_dict(stock.state_dict())  # strictly, though it has tables
    copies = [copy.deepcopy(model)]
    if name not in BACKBONES:  # stock backbones carry hooks of transformers that cannot be pickled
        copies.append(pickle.loads(pickle.dumps(model)))
    for duplicate in copies:
        assert all(torch.equal(a, b) for a, b in zip(outputs(duplicate, sample), after, strict=True))
        vispe.restore(duplicate)
        assert all(torch.equal(a, b) for a, b in zip(outputs(duplicate, sample), before, strict=True))
    vispe.restore(model)
    assert [type(m) for m in model.modules()] == types
    assert list(model.state_dict()) == names
    assert model.config.to_dict() == stock.config.to_dict()
    assert all(torch.equal(a, b) for a, b in zip(outputs(model, sample), before, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in MODELS if n != "DINOv3ViTModel"])
def test_a_table_is_restored_in_another_precision(name):
    model, stock = build(name), without_tables(build(name))
    vispe.convert(model, "none")
    for size in ((16, 16), (12, 28)):
        sample = inputs(name, *size)
        for a, b in zip(outputs(model, sample), outputs(stock, sample), strict=True):
            close(a, b, 1e-12)
    assert not any("relative_position" in n or "position_embedding" in n for n in model.state_dict())
    model.float()
    vispe.restore(model)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    close(model.embeddings.position_embeddings, build(name).embeddings.position_embeddings.float(), 1e-7)


@cases("name", ["DINOv3ViTModel", "DINOv3ViTBackbone"])
def test_the_rotation_of_dinov3_is_stored_or_replaced(name):
    model, sample = build(name), inputs(name, 12, 28)
    tower = vision_tower_of(model)
    masks = masks_of(name, sample, torch.ones(2, 2).double())
    stock = by_hand(build(name), masks, rope=True)
    vispe.convert(model, "alibi2d+rope")
    for a, b in zip(outputs(model, sample), outputs(stock, sample), strict=True):
        close(a, b, 1e-6)
    vispe.convert(model, "alibi2d")
    by_hand(stock, masks, rope=False)
    for a, b in zip(outputs(model, sample), outputs(stock, sample), strict=True):
        close(a, b, 1e-6)
    with pytest.raises(UnsupportedCombination, match="two rotary encodings"):
        vispe.convert(model, "rope_axial+rope")
    with pytest.raises(UnsupportedCombination, match="no absolute table to keep"):
        vispe.convert(model, "alibi2d+learn")
    vispe.convert(model, "rope_axial")
    assert vision_tower_of(model) is tower
    assert "own rotary embedding: removed" in vispe.describe(model)


def test_rotation_of_dinov3_equals_rope_dinov3():
    model, sample = build("DINOv3ViTModel"), inputs("DINOv3ViTModel", 12, 28)
    before = outputs(model, sample)
    vispe.convert(model, "rope_dinov3")
    for a, b in zip(outputs(model, sample), before, strict=True):
        close(a, b, 1e-6)


def test_random_masking_of_mae_is_unchanged():
    model, pixels = build("ViTMAEModel"), inputs("ViTMAEModel")["pixel_values"]
    torch.manual_seed(3)
    before = model(pixels)
    vispe.convert(model, "none+learn")
    torch.manual_seed(3)
    after = model(pixel_values=pixels)
    assert torch.equal(after.ids_restore, before.ids_restore)
    close(after.last_hidden_state, before.last_hidden_state, 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_eager_attention_returns_weights_and_applies_a_mask(name):
    model, sample = build(name), inputs(name)
    stock = without_tables(build(name))
    model.set_attn_implementation("eager")
    vispe.convert(model, "alibi2d")
    masks = masks_of(name, sample, torch.ones(2, 2).double())
    actual = model(**sample, output_attentions=True)
    close(actual.last_hidden_state, by_hand(stock, masks)(**sample).last_hidden_state, 1e-6)
    assert len(actual.attentions) == 2
    close(actual.attentions[1].sum(-1), torch.ones(actual.attentions[1].shape[:3]).double(), 1e-12)
    if name in ("DINOv3ViTModel",):  # its forward pass makes no mask
        return
    tokens = actual.last_hidden_state.shape[1]
    recorded = torch.ones(2, tokens, dtype=torch.long)
    recorded[0, 3] = recorded[1, -1] = 0
    hidden = [m.masked_fill(recorded[:, None, None] == 0, float("-inf")) for m in masks]
    expected = by_hand(stock, hidden)(**sample).last_hidden_state
    for kind in ("eager", "sdpa"):
        model.set_attn_implementation(kind)
        close(model(**sample, attention_mask=recorded).last_hidden_state, expected, 1e-6)


@cases("name", MODELS)
def test_returned_weights_are_part_of_the_graph(name):
    """They have gradients, as saliency maps need, and include dropout, as in transformers."""
    model, sample = build(name), inputs(name)
    model.set_attn_implementation("eager")
    vispe.convert(model, "alibi2d")
    actual = model(**sample, output_attentions=True)
    for weights in actual.attentions:
        weights.retain_grad()
    (actual.last_hidden_state * cotangent(actual.last_hidden_state, 3)).sum().backward()
    assert all(weights.grad is not None and weights.grad.abs().max() > 0 for weights in actual.attentions)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_forward_keeps_the_signature_of_stock(name):
    """transformers reads it to determine inputs and outputs of a model."""
    model = build(name)
    tower = vision_tower_of(model)
    stock = inspect.signature(type(tower).forward)
    vispe.convert(model, "alibi2d")
    assert inspect.signature(type(tower).forward) == stock


@partly(8)
@cases("name", EVERY)
def test_weights_and_encoding_are_saved_and_loaded(name, tmp_path):
    model, sample = build(name).float(), inputs(name)
    sample |= {k: v.float() for k, v in sample.items() if isinstance(v, torch.Tensor)}
    vispe.convert(model, "alibi2d(slopes=learned)")
    with torch.no_grad():
        for p in (p for n, p in model.named_parameters() if "pos_enc" in n):
            p.mul_(1.5)
    with warnings.catch_warnings(action="ignore"):
        model.save_pretrained(tmp_path)
    # AutoBackbone reads no folders, of stock models either
    auto = transformers.AutoModel if name in MODELS else getattr(transformers, name)
    actual = vispe.from_pretrained(auto, tmp_path).eval()
    assert actual.state_dict().keys() == model.state_dict().keys()
    pairs = zip(outputs(actual, sample), outputs(copy.deepcopy(model), sample), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["alibi2d(slopes=learned)", "rope_mixed", "irpe", "fire"])
@pytest.mark.parametrize("name", ["ViTModel", "Dinov2Model", "DINOv3ViTModel"])
def test_weights_of_an_encoding_are_initialised_with_the_model(name, spec):
    """Built without memory, allocated and initialised, as large models are."""
    stock = build(name).float()
    with torch.device("meta"):
        model = vispe.convert(type(stock)(stock.config), spec)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
    model.init_weights()
    tower, fresh = vision_tower_of(model), vision_tower_of(vispe.convert(stock, spec))
    for (path, tensor), (_, expected) in zip(tower.named_buffers(), fresh.named_buffers(), strict=True):
        torch.testing.assert_close(tensor, expected, rtol=0, atol=0, msg=path)
    for (path, tensor), (_, other) in zip(tower.named_parameters(), fresh.named_parameters(), strict=True):
        assert tensor.isfinite().all(), path
        assert (tensor.abs().max() == 0) == (other.abs().max() == 0) or "pos_enc" not in path, path


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ViTModel", "Dinov2Model", "DINOv3ViTModel"])
def test_export_with_dynamic_batch_size(name):
    model, sample = build(name).float(), inputs(name)
    pixels = sample["pixel_values"].float()
    vispe.convert(model, "alibi2d(slopes=learned)")
    program = torch.export.export(
        model, (pixels,), dynamic_shapes=({0: torch.export.Dim("b")},), strict=False
    )
    more = torch.cat([pixels, pixels + 1])
    close(program.module()(more).last_hidden_state, model(more).last_hidden_state, 1e-6)


@pytest.mark.filterwarnings(
    "ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)
@cases("name", ["IJepaModel", "Dinov2Model", "DINOv3ViTModel", "BeitModel"])
def test_a_jit_trace_rejects_another_grid_with_equal_token_count(name):
    model, x = vispe.convert(build(name), "alibi2d", keep_abs=False), inputs(name)["pixel_values"]
    graph = torch.jit.trace(model, x, strict=False, check_trace=False)
    close(graph(x.flip(0))["last_hidden_state"], model(x.flip(0)).last_hidden_state)
    with pytest.raises(RuntimeError, match="size of the tensor"):
        graph(x.reshape(2, 3, 8, 32))


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.parametrize("name", ["ViTModel", "DeiTModel", "Dinov2Model", "DINOv3ViTModel"])
def test_a_converted_model_is_compiled_without_a_break(name):
    model = build(name).float()
    vispe.convert(model, "alibi2d(slopes=learned)")
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for size in ((16, 16), (12, 28)):
        sample = inputs(name, *size)
        sample["pixel_values"] = sample["pixel_values"].float()
        close(compiled(**sample).last_hidden_state, model(**sample).last_hidden_state, 1e-5)


def test_a_pipeline_runs_the_encoding():
    image_module = pytest.importorskip("PIL.Image")
    model = build("ViTForImageClassification", num_labels=3).float()
    processor = transformers.ViTImageProcessor(size={"height": 16, "width": 16})
    image = image_module.new("RGB", (20, 18), (200, 40, 90))
    scores = []
    for spec in ("alibi2d", "gaussian2d(amplitude=9.0)", "alibi2d"):
        vispe.convert(model, spec)
        pipe = transformers.pipeline("image-classification", model=model, image_processor=processor)
        scores.append({entry["label"]: entry["score"] for entry in pipe(image)})
    assert scores[0] == scores[2] != scores[1]
