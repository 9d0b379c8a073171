"""Prefix and prompt tuning of peft: virtual tokens are text before the prompt."""

import warnings

import pytest
import torch
from transformers import DynamicCache

import vispe
from tests.cases import cases
from tests.hosts.transformers.conftest import IGNORED_WARNINGS
from tests.hosts.transformers.more import OMNI
from tests.hosts.transformers.samples import EVERY, NOT_PACKABLE, inputs_of, model_of
from tests.hosts.transformers.tiny import QWEN, needs
from tests.products import partly
from vispe.hosts.transformers.language.families import family_of
from vispe.hosts.transformers.language.positions.kv_cache import PREFIX, state_of_prefix
from vispe.hosts.transformers.language.positions.position_assignment import DecodingStep

peft = pytest.importorskip("peft", reason="peft is not installed")
pytestmark = [pytest.mark.filterwarnings(line) for line in IGNORED_WARNINGS]
FAST = ("qwen2_vl", "qwen3_vl", "llava", "gemma3")
SLOTS = 5
# they take embeddings of their own tokens only
STOCK_FAILS = {(family, "Prompt") for family in ("gemma4", "molmo2")}
# with a mask: they expect that it is as long as the tokens
STOCK_FAILS |= {(family, "Prefix") for family in OMNI}
ROWS = torch.tensor([[0, 0, 0, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16, 17]])
SEEN = (ROWS != 0).long()


def sampled(families):
    return [f if f in FAST else pytest.param(f, marks=pytest.mark.slow) for f in families]


def tuned(family, spec=None, kind="PrefixTuningConfig", **options):
    """Return a model with deterministic virtual tokens; stock without a spec."""
    model = model_of(family)
    if spec == "own":
        spec = family_of(model.model.config).own(model.model.config)
    model = model if spec is None else vispe.convert(model, spec, **options)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=SLOTS))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in adapted.parameters():
            if weight.requires_grad:
                weight.copy_(torch.randn(weight.shape, generator=generator))
    return adapted.eval()


def logits(model, **inputs):
    with torch.no_grad():
        return model(**inputs).logits


def generate(model, **inputs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft, on names of the cache
        return model.generate(**inputs, max_new_tokens=4, do_sample=False)


@cases("kind", ["PrefixTuningConfig", "PromptTuningConfig"])
@pytest.mark.parametrize("family", sampled(f for f in EVERY if f not in NOT_PACKABLE))
def test_text_equals_the_stock_model(family, kind):
    if (family, kind[:6]) in STOCK_FAILS:
        pytest.skip("the stock model fails")
    if kind == "PromptTuningConfig" and family in QWEN:
        needs("5.18", "generation of the stock model fails")
    stock, model = tuned(family, kind=kind), tuned(family, "vrope", kind)
    text = {"input_ids": ROWS[1:]}
    for inputs in (text, text | {"attention_mask": SEEN[1:]}, {"input_ids": ROWS, "attention_mask": SEEN}):
        expected, actual = logits(stock, **inputs), logits(model, **inputs)
        if len(expected) > 1 and expected.shape[1] == ROWS.shape[1]:  # of rows of padding nothing is said
            expected, actual = (x[SEEN.bool()] for x in (expected, actual))
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        if kind == "PrefixTuningConfig" or len(inputs["input_ids"]) == 1:
            assert torch.equal(generate(model, **inputs), generate(tuned(family, kind=kind), **inputs))


@cases("family", ["llava", "internvl"])
def test_gradients_of_virtual_tokens_equal_the_stock_model(family):
    grads = []
    for model in (tuned(family), tuned(family, "mrope_i")):
        model.train()
        model(input_ids=ROWS[1:], attention_mask=SEEN[1:], labels=ROWS[1:]).loss.backward()
        grads.append([w.grad for w in model.parameters() if w.requires_grad])
    torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=0)
    assert all(g.abs().max() > 0 for g in grads[0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["PrefixTuningConfig", "PromptTuningConfig"])
@pytest.mark.parametrize("family", ["llava", "internvl", "gemma3", "smolvlm", "mistral3"])
def test_the_scheme_of_the_stock_model_with_images(family, kind):
    inputs = {k: v for k, v in inputs_of(family, True, 3, 1).items() if not k.endswith("type_ids")}
    stock, model = tuned(family, kind=kind), tuned(family, "own", kind)
    torch.testing.assert_close(logits(model, **inputs), logits(stock, **inputs), rtol=0, atol=0)
    assert torch.equal(generate(model, **inputs), generate(stock, **inputs))


def rows(positions):
    """Return token indices and coordinates (1 + axes, b, s) for a prompt or one decoded token."""
    if isinstance(positions, DecodingStep):
        coordinates = positions.scheme.continue_text(positions.token_index, positions.offset)
    else:
        coordinates = positions.coordinates
    return torch.cat([positions.token_index[None].to(coordinates), coordinates])


@cases("late", [False, True])
def test_the_state_of_virtual_tokens_has_coordinates_for_late_rotation_only(late):
    cache, tokens = DynamicCache(), torch.zeros(2, 7, dtype=torch.long)
    setattr(cache, PREFIX, True)
    cache.update(torch.zeros(2, 1, SLOTS, 8), torch.zeros(2, 1, SLOTS, 8), 0)
    ids = state_of_prefix(cache, tokens, 3, late=late, by_mask=False).ids
    assert (None if ids is None else tuple(ids.shape)) == ((3, 2, SLOTS) if late else None)
    assert state_of_prefix(cache, tokens, 3, late=late, by_mask=False) is None  # the mark is removed


@partly(1)
@cases("late", [False, True])
@cases("spec", ["own", "vrope", "v2pe(stride=4)"])
@cases("family", ["qwen2_5_vl", "llava"])
def test_images_after_virtual_tokens(family, spec, late):
    """As many words in front of the prompt give the same positions."""
    model = tuned(family, spec, late_rotation=late)
    inner = model.get_base_model().model
    inputs = inputs_of(family, True, 3, 1)
    words = torch.ones(1, SLOTS, dtype=torch.long)
    longer = {
        k: torch.cat([words * (k != "mm_token_type_ids"), v], 1)
        if v.shape[:2] == inputs["input_ids"].shape
        else v
        for k, v in inputs.items()
    }
    positioned = []
    inner.language_model.register_forward_pre_hook(
        lambda _, args, kwargs: positioned.append(kwargs["position_ids"]), with_kwargs=True
    )
    with torch.no_grad():
        model(**inputs)
        model.get_base_model()(**longer)
        assert torch.equal(rows(positioned[0]), rows(positioned[1])[..., SLOTS:])
        positioned.clear()
        generate(model, **inputs)
        generate(model.get_base_model(), **longer)
    sample, expected = (
        [rows(p) for p in half]
        for half in (positioned[: len(positioned) // 2], positioned[len(positioned) // 2 :])
    )
    assert torch.equal(sample[0], expected[0][..., SLOTS:])
    assert all(torch.equal(a, b) for a, b in zip(sample[1:], expected[1:], strict=True))


def test_other_caches_without_a_state_are_rejected():
    stock, model = model_of("llava"), vispe.convert(model_of("llava"), "mrope_i")
    with torch.no_grad():
        out = stock(input_ids=ROWS[1:])
        name = next(n for n in ("cache", "past_key_values") if out.get(n) is not None)
        with pytest.raises(vispe.errors.InputError, match="The cache must be filled by a model with"):
            model(input_ids=ROWS[1:], **{name: out[name]})
