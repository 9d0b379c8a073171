"""Packed samples are isolated in every family: in the plain call, in the Trainer, and in the recipe."""

import pytest
import torch
from torch.nn.functional import cross_entropy

import vispe
from tests.cases import cases
from tests.hosts.transformers.conftest import IGNORED_WARNINGS
from tests.hosts.transformers.samples import EVERY, NOT_PACKABLE, logits_of, longest_of, model_of, samples_of
from vispe.errors import InputError, UnsupportedHost
from vispe.train.vlm.lora import LoraRecipe, finetune_scheme
from vispe.train.vlm.packing import IGNORED, Packing
from vispe.train.vlm.prompts import OrderedPrompt

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.filterwarnings(line) for line in IGNORED_WARNINGS]
FAST = (
    "qwen2_5_vl",
    "internvl",
    "llava_onevision",
    "glm4v",
    "smolvlm",
    "gemma3",
    "mistral3",
    "molmo2",
    "gemma4",
)
TRAINED = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "glm4v",
    "internvl",
    "smolvlm",
    "gemma3",
    "mistral3",
    "llava",
)
PACKABLE = tuple(family for family in EVERY if family not in NOT_PACKABLE)


def sampled(families, fast):
    """The families, of which some are for the fast suite."""
    return [f if f in fast else pytest.param(f, marks=pytest.mark.slow) for f in families]


def each(packing, samples, actual):
    """Yield each sample, with what the rows of a packed batch have for it."""
    for at, row in enumerate(packing.rows([s.inputs["input_ids"].shape[1] for s in samples])):
        end = 0
        for k in row:
            start, end = end, end + samples[k].inputs["input_ids"].shape[1]
            yield samples[k], actual[at, start:end]


def token_weighted_loss(model, samples):
    """The mean over all tokens of answers, each sample in a call of its own."""
    with torch.no_grad():
        losses = [cross_entropy(logits_of(model, s)[s.asking], s.wanted, reduction="none") for s in samples]
    return float(torch.cat(losses).mean())


@pytest.mark.parametrize("attention", ["sdpa", pytest.param("eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", sampled(PACKABLE, FAST))
def test_a_plain_call_has_the_logits_of_separate_samples(family, attention):
    model = vispe.convert(model_of(family, attention), "vrope")
    samples = samples_of(family)
    packing = Packing(model, longest_of(samples))
    inputs = packing(samples)
    labels = inputs.pop("labels")
    assert len(labels) > 1
    with torch.no_grad():
        # statistics of batch norms are those of all images of a call
        norms = any(isinstance(m, torch.nn.BatchNorm2d) for m in model.modules())
        for training in (False,) if norms else (False, True):
            model.train(training)
            rng_state = torch.get_rng_state()
            logits_of(model, samples[1])
            if not torch.equal(rng_state, torch.get_rng_state()):
                continue  # dropout or stochastic depth of a vision tower
            for sample, actual in each(packing, samples, model(**inputs).logits):
                torch.testing.assert_close(actual, logits_of(model, sample), atol=2e-5, rtol=1e-5)
    for sample, losses in each(packing, samples, labels):
        assert torch.equal(losses[sample.answer], sample.wanted)
        assert int((losses != IGNORED).sum()) == len(sample.wanted)


@cases("family", NOT_PACKABLE)
def test_layers_that_do_not_isolate_samples_raise(family):
    """Nothing that the call or its ids say would stop a state, an indexer or a prefix at the end of a sample."""
    if family not in EVERY:
        return  # this transformers does not have it
    model = vispe.convert(model_of(family, "eager"), "vrope")
    kinds = NOT_PACKABLE[family]
    with pytest.raises(
        UnsupportedHost, match=rf"Packing: .* got layers of type {kinds}, which do not isolate"
    ):
        Packing(model, 80)
    tokens = torch.arange(1, 8)[None]
    ids = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    with torch.no_grad(), pytest.raises(UnsupportedHost, match=rf"forward: .* got layers of type {kinds}"):
        model(input_ids=tokens, position_ids=ids)


@pytest.mark.parametrize("family", sampled(TRAINED, ("qwen3_vl",)))
def test_the_recipe_learns_from_isolated_samples(family, tmp_path, monkeypatch):
    """An adapter of zeros changes nothing, so the first loss is that of the converted model."""
    pytest.importorskip("peft", reason="peft is not installed")
    samples = samples_of(family)
    expected = token_weighted_loss(vispe.convert(model_of(family), "vrope").train(), samples)
    losses, compute = [], transformers.Trainer.compute_loss

    def record_loss(self, model, inputs, *args, **kwargs):
        loss = compute(self, model, inputs, *args, **kwargs)
        losses.append((loss[0] if isinstance(loss, tuple) else loss).item())
        return loss

    monkeypatch.setattr(transformers.Trainer, "compute_loss", record_loss)
    recipe = LoraRecipe(
        scheme="vrope", steps=1, batch_size=len(samples), max_length=longest_of(samples), rank=2
    )
    finetune_scheme(model_of(family), samples, recipe, tmp_path, device="cpu")
    assert losses[0] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("family", sampled(TRAINED, ("internvl",)))
def test_the_trainer_evaluates_isolated_samples(family, tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = vispe.convert(model_of(family), "vrope")
    samples = samples_of(family)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_eval_batch_size=len(samples), use_cpu=True, report_to=[],
        remove_unused_columns=False, label_names=["labels"], disable_tqdm=True, prediction_loss_only=True,
    )  # fmt: skip
    packing = Packing(model, longest_of(samples))
    trainer = transformers.Trainer(model, arguments, data_collator=packing, eval_dataset=samples)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(token_weighted_loss(model, samples), abs=1e-5)


def test_the_first_token_of_a_sample_has_no_loss():
    """The token before it is of another sample, from which nothing is to be predicted."""
    model = vispe.convert(model_of("llava"), "vrope")
    samples = [OrderedPrompt(s.inputs, (), slice(0, s.answer.stop)) for s in samples_of("llava")]
    packing = Packing(model, 400)
    for _, losses in each(packing, samples, packing(samples)["labels"]):
        assert losses[0] == IGNORED
        assert (losses[1:] != IGNORED).all()


def test_samples_that_cannot_be_packed_raise():
    model = vispe.convert(model_of("llava"), "vrope")
    first, second = samples_of("llava")[1:3]
    padded = first.inputs | {"attention_mask": first.inputs["attention_mask"].clone()}
    padded["attention_mask"][0, 0] = 0
    with pytest.raises(InputError, match=r"one row .* without padding, got sample 1 with 1 row"):
        Packing(model, 400)([second, OrderedPrompt(padded, (), first.answer)])
    two = {k: torch.cat([v, v]) for k, v in first.inputs.items()}
    with pytest.raises(InputError, match="got sample 0 with 2 rows"):
        Packing(model, 400)([OrderedPrompt(two, (), first.answer)])
    for value, words in ((torch.zeros(1, 3), "image_sizes must have equal shapes"), ("a", "must be equal")):
        name = "image_sizes" if isinstance(value, torch.Tensor) else "vision_aspect_ratio"
        other = torch.zeros(1, 2) if isinstance(value, torch.Tensor) else "b"
        pair = [
            OrderedPrompt(s.inputs | {name: v}, (), s.answer) for s, v in ((first, value), (second, other))
        ]
        with pytest.raises(InputError, match=words):
            Packing(model, 400)(pair)
