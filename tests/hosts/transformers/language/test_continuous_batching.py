"""Continuous batching: `generate_batch` continues text of many requests in one row, as `generate` does for each."""

import pytest
import torch

import vispe
from tests.hosts.transformers.reference import converted, copy_of
from tests.hosts.transformers.tiny import transformers

if not hasattr(transformers, "ContinuousBatchingConfig"):
    pytest.skip("this version of transformers has no such configuration", allow_module_level=True)
PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14]]


def batched(model):
    """Return the outputs for each prompt."""
    options = {"page_size": 16, "num_blocks": 8, "max_batch_tokens": 32}
    return model.generate_batch(
        inputs=PROMPTS,
        generation_config=transformers.GenerationConfig(
            max_new_tokens=3, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=transformers.ContinuousBatchingConfig(**options),
        warmup=False,
    ).values()


@pytest.mark.parametrize("family", ["qwen2_vl", pytest.param("llava", marks=pytest.mark.slow)])
def test_requests_are_independent(family):
    model = converted(family, "tad_rope")  # two positions for each text token
    for prompt, output in zip(PROMPTS, batched(model), strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=3, do_sample=False)
        assert output.error is None
        assert output.generated_tokens == expected[0, len(prompt) :].tolist()


def test_late_rotation_is_refused():
    model = vispe.convert(copy_of("llava"), "v2pe", late_rotation=True)
    for output in batched(model):
        assert "convert the model without late_rotation" in output.error
