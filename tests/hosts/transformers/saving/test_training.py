"""Adapters and the Trainer save the scheme and the encoding of a converted model."""

import copy
import json
import warnings

import peft
import pytest
import torch
import transformers

import vispe
from tests.cases import cases
from tests.hosts.transformers.reference import copy_of
from tests.hosts.transformers.saving.test_saving import (
    AUTO,
    LOADED,
    SAVED,
    TOWERS,
    everything,
    logits,
    same_model,
    save,
    with_tower,
)
from tests.hosts.transformers.tiny import FAMILIES, batch
from tests.products import partly

# which peft asks for
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
ADAPTED = "is saved without its base model, which has the position scheme"


def adapted(model, **options):
    """Add adapters with an effect to a model."""
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **options)
    torch.manual_seed(3)
    return peft.get_peft_model(model, config).eval()


@partly(1)
@cases("family", FAMILIES)
def test_adapters_on_a_converted_model(family, tmp_path):
    model = with_tower(vispe.convert(copy_of(family), "v2pe(stride=4)"), TOWERS[1])
    before = logits(model, family)
    save(model, tmp_path / "base")
    base = vispe.from_pretrained(AUTO, tmp_path / "base")
    tuned = adapted(base)
    expected = logits(tuned, family)
    assert not torch.equal(expected, before)
    with pytest.warns(UserWarning, match=ADAPTED):
        tuned.save_pretrained(tmp_path / "adapter")
    actual = peft.PeftModel.from_pretrained(
        vispe.from_pretrained(AUTO, tmp_path / "base"), tmp_path / "adapter"
    )
    assert torch.equal(logits(actual, family), expected)
    at_once = vispe.from_pretrained(AUTO, tmp_path / "adapter")  # transformers finds the base model
    assert torch.equal(logits(at_once, family), expected)
    with pytest.warns(UserWarning, match=LOADED):
        peft.AutoPeftModel.from_pretrained(tmp_path / "adapter")
    merged = tuned.merge_and_unload()
    save(merged, tmp_path / "merged")
    same_model(vispe.from_pretrained(AUTO, tmp_path / "merged"), merged, family)
    torch.testing.assert_close(logits(merged, family), expected, rtol=1e-4, atol=1e-4)


@cases("spec", ["alibi2d(slopes=learned)", "rope_mixed"])
def test_weights_of_an_encoding_in_an_adapter(spec, tmp_path):
    model = vispe.convert(copy_of("llava"), spec)
    save(model, tmp_path / "base")
    tuned = adapted(model, modules_to_save=["pos_enc"])
    trained = [p for name, p in tuned.named_parameters() if "pos_enc" in name and p.requires_grad]
    assert trained
    with torch.no_grad():
        for p in trained:
            p.add_(0.5)
    expected = logits(tuned, "llava")
    with pytest.warns(UserWarning, match="is saved without its base model, which has the encoding"):
        tuned.save_pretrained(tmp_path / "adapter")
    actual = peft.PeftModel.from_pretrained(
        vispe.from_pretrained(AUTO, tmp_path / "base"), tmp_path / "adapter"
    )
    assert torch.equal(logits(actual, "llava"), expected)


class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {"index": index}


def trainer(model, family, folder, steps, **options):
    def collated(items):
        inputs = dict(batch(family, [7], [3, "image", 4, "wide", 2], seed=items[0]["index"]).inputs)
        return inputs | {"labels": inputs["input_ids"].clone()}

    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=2, max_steps=steps, save_steps=2, learning_rate=1e-2, report_to=[],
        use_cpu=True, remove_unused_columns=False, disable_tqdm=True, dataloader_pin_memory=False, **options,
    )  # fmt: skip
    return transformers.Trainer(model, arguments, train_dataset=Sentences(), data_collator=collated)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_training_continues_with_the_scheme(family, tmp_path):
    model = with_tower(vispe.convert(copy_of(family), "v2pe(stride=4)"), TOWERS[1])
    unbroken = trainer(model, family, tmp_path, 4)
    with pytest.warns(UserWarning, match=SAVED):
        unbroken.train()
    middle = tmp_path / "checkpoint-2"
    assert json.loads((middle / "config.json").read_text())["vispe"]["scheme"]["name"] == "v2pe"
    resumed = trainer(vispe.from_pretrained(AUTO, middle), family, tmp_path / "again", 4)
    with pytest.warns(UserWarning, match=SAVED):
        resumed.train(resume_from_checkpoint=str(middle))
    assert resumed.state.global_step == 4
    same_model(resumed.model.eval(), unbroken.model.eval(), family)
    last = vispe.from_pretrained(AUTO, tmp_path / "again" / "checkpoint-4")
    assert torch.equal(logits(last, family), logits(resumed.model, family))


@pytest.mark.slow
def test_a_reference_model_and_an_average_of_weights():
    model = with_tower(vispe.convert(copy_of("qwen2_vl"), "v2pe(stride=4)"), TOWERS[1])
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    same_model(average.module.eval(), model, "qwen2_vl")
    reference = model.__class__(model.config).eval()
    reference.load_state_dict(model.state_dict())
    same_model(reference, model, "qwen2_vl")
    same_model(copy.deepcopy(reference), model, "qwen2_vl")
    sample = everything("qwen2_vl").inputs
    assert torch.equal(
        model.generate(**sample, max_new_tokens=3, do_sample=False),
        reference.generate(**sample, max_new_tokens=3, do_sample=False),
    )


def test_adapters_of_a_stock_model_are_saved_without_warnings(tmp_path):
    with warnings.catch_warnings(action="error", category=UserWarning):
        adapted(copy_of("llava")).save_pretrained(tmp_path)
