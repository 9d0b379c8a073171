"""Training: without mask, fractional and shared ids, packing, gradient checkpointing."""

import pytest
import torch

import vispe
from tests.cases import cases
from tests.hosts.transformers.reference import copy_of
from tests.hosts.transformers.tiny import FAMILIES, QWEN, batch
from tests.products import partly

KINDS = ["v2pe", "mousi", "rope_dhr", "mrope_i"]


def trained(family, spec, kv_heads=1):
    """Return a converted model in training mode."""
    return vispe.convert(copy_of(family, kv_heads), spec).train()


def gradients(model, logits):
    """Return the gradient of every weight that has one, for a random cotangent."""
    model.zero_grad()
    seed = torch.Generator().manual_seed(5)
    (logits * torch.randn(logits.shape, generator=seed)).sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("spec", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_ids_with_other_steps_than_one_do_not_split_attention(family, spec):
    model = trained(family, spec)
    unmasked = batch(family, [4, "image", 3, "wide", 2], mask=False)
    masked = batch(family, [4, "image", 3, "wide", 2])
    actual, expected = [], []
    for out, sample in ((actual, unmasked), (expected, masked)):
        torch.manual_seed(11)  # v2pe draws its strides
        logits = model(**sample.inputs).logits
        out.extend((logits, gradients(model, logits)))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5)
    changed = dict(unmasked.inputs, input_ids=unmasked["input_ids"].clone())
    changed["input_ids"][0, 0] = changed["input_ids"][0, 0] % 200 + 7
    torch.manual_seed(11)
    with torch.no_grad():
        other = model(**changed).logits
    assert (other[0, -1] - actual[0][0, -1]).abs().max() > 1e-3  # the last token sees the first


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_strides_are_drawn_in_training_only(family):
    model, sample = trained(family, "v2pe"), batch(family, [4, "image", 3])
    with torch.no_grad():
        logits = torch.stack([model(**sample.inputs).logits[0, -1] for _ in range(6)])
        model.eval()
        fixed = torch.stack([model(**sample.inputs).logits[0, -1] for _ in range(2)])
    assert len({tuple(d.tolist()) for d in logits}) > 1
    assert torch.equal(fixed[0], fixed[1])


@partly(1)
@cases("spec", ["mrope_i", "v2pe"])
@cases("family", FAMILIES)
def test_packing_isolates_samples(family, spec):
    """Ids that restart at 0 begin another sample, with separate positions and attention."""
    model = vispe.convert(copy_of(family), spec)
    rows = [3, "image", 4], [2, "wide", 1, "image", 2], [5]
    parts = [batch(family, row, seed=s, mask=False) for s, row in enumerate(rows)]
    tokens = ("input_ids", "mm_token_type_ids")
    packed = {
        n: torch.cat([p[n] for p in parts[:2]]) for n in parts[0].inputs if n not in (*tokens, "pixel_values")
    }
    if family == "llava_onevision":
        most = max(p["pixel_values"].shape[1] for p in parts[:2])
        pixels = [p["pixel_values"] for p in parts[:2]]
        pad = [torch.cat([x, x.new_zeros(len(x), most - x.shape[1], *x.shape[2:])], 1) for x in pixels]
        packed["pixel_values"] = torch.cat(pad)
    else:
        packed["pixel_values"] = torch.cat([p["pixel_values"] for p in parts[:2]])
    for name in tokens:
        if name in parts[0].inputs:
            packed[name] = torch.cat([p[name] for p in parts], 1)
    ids = torch.cat([torch.arange(p["input_ids"].shape[1]) for p in parts])[None]
    with torch.no_grad():
        actual = model(**packed, position_ids=ids).logits
        expected = [model(**p.inputs).logits for p in parts]
        torch.testing.assert_close(actual, torch.cat(expected, 1), rtol=1e-5, atol=1e-5)
        first = parts[0]["input_ids"].shape[1]
        packed["input_ids"][0, :2] = torch.tensor([17, 18])
        changed = model(**packed, position_ids=ids).logits
    assert torch.equal(changed[:, first:], actual[:, first:])
    assert not torch.equal(changed[:, first - 1], actual[:, first - 1])


@cases("family", FAMILIES)
def test_packing_with_coordinates(family):
    """Keys that restart at 0, with custom coordinates."""
    model = vispe.convert(copy_of(family), "v2pe")
    first, second = (batch(family, row, mask=False) for row in ([6], [8]))
    tokens = torch.cat([first["input_ids"], second["input_ids"]], 1)
    keys = torch.cat([torch.arange(6), torch.arange(8)])[None].double()
    both = torch.cat([keys[None], 0.5 * keys[None]])
    types = {"mm_token_type_ids": torch.zeros_like(tokens)} if family in QWEN else {}
    with torch.no_grad():
        actual = model(input_ids=tokens, position_ids=both, **types).logits
        halves = [
            model(**p.inputs, position_ids=0.5 * torch.arange(n)[None, None]).logits
            for p, n in ((first, 6), (second, 8))
        ]
    torch.testing.assert_close(actual, torch.cat(halves, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "reentrant"), [("v2pe", False), ("v2pe", True), ("mhrope(sections=[1,0,1])", False)]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing_does_not_change_gradients(family, spec, reentrant):
    sample = batch(family, [3, "image", 4], [2, "wide", 3])
    labels = sample["input_ids"].masked_fill(sample["input_ids"] > 249, -100)
    results = []
    for checkpointing in (False, True):
        model = trained(family, spec, 2)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        torch.manual_seed(3)
        out = model(**sample.inputs, labels=labels)
        out.loss.backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        results.append((out.loss.detach(), grads))
    assert any("q_proj" in n for n in results[0][1])
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointing_recomputes_every_layer(family, reentrant):
    """A layer is checkpointed only if the checkpoint wraps its outermost forward."""
    model = vispe.convert(copy_of(family), "vrope").train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    layers, runs = model.model.language_model.layers, []
    for number, layer in enumerate(layers):
        layer.self_attn.register_forward_pre_hook(lambda *_, number=number: runs.append(number))
    sample = batch(family, [3, "image", 4])
    model(**sample.inputs).logits.sum().backward()
    assert sorted(runs) == sorted([*range(len(layers))] * 2)
