"""Masks (b, s) with numbers other than 0 and 1, such as those that number packed samples."""

import pytest
import torch

from tests.cases import cases
from tests.hosts.transformers.reference import converted
from tests.hosts.transformers.tiny import FAMILIES, QWEN, batch
from vispe.errors import InputError

SENTENCE = "attention_mask .*must be 1 for tokens and 0 for padding, got the value 2. .*packed samples"


@cases("prompt", [[3, "image", 4, "wide", 2], [9]], ids=["images", "text"])
@cases("family", FAMILIES)
def test_masks_that_number_packed_samples_are_rejected(family, prompt):
    sample, model = batch(family, prompt), converted(family, "vrope")
    for dtype in (torch.long, torch.int32, torch.float32):
        mask = torch.ones_like(sample["input_ids"]).to(dtype)
        mask[:, 5:] = 2
        with pytest.raises(InputError, match=SENTENCE):
            model(**sample.inputs | {"attention_mask": mask})
        with pytest.raises(InputError, match=SENTENCE):
            model.generate(**sample.inputs | {"attention_mask": mask}, max_new_tokens=2)
        if family in QWEN:
            with pytest.raises(InputError, match=SENTENCE):
                model.model.get_rope_index(sample["input_ids"], attention_mask=mask)


@cases("family", FAMILIES)
def test_masks_of_any_dtype_are_equal(family):
    sample, model = batch(family, [4], [3, "image", 4]), converted(family, "vrope")
    expected = model(**sample.inputs).logits
    for dtype in (torch.bool, torch.int32, torch.float32):
        mask = sample["attention_mask"].to(dtype)
        actual = model(**sample.inputs | {"attention_mask": mask}).logits
        assert torch.equal(actual[mask.bool()], expected[mask.bool()])


def test_a_second_turn_is_checked():
    sample, model = batch("llava", [3, "image", 4]), converted("llava", "vrope")
    first = model(**sample.inputs, use_cache=True)
    recorded = sample["input_ids"].shape[1]
    mask = torch.ones(1, recorded + 3)
    mask[:, -2:] = 3
    cache = {name: first[name] for name in ("cache", "past_key_values") if name in first}
    with pytest.raises(InputError, match="got the value 3"):
        model(input_ids=torch.tensor([[4, 5, 6]]), attention_mask=mask, **cache)
