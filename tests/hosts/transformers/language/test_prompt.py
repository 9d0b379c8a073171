"""The coordinates of a prompt are passed to every step of generation as one typed object, with a row for each beam."""

import pytest
import torch

import vispe
from tests.cases import cases
from tests.hosts.transformers.reference import converted, copy_of
from tests.hosts.transformers.tiny import batch, transformers
from vispe.errors import UnsupportedHost
from vispe.hosts.transformers.language.converted_classes.generation import GENERATION
from vispe.hosts.transformers.language.positions.prompt import PROMPT, PromptPositions

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def calls(model, sample, **options):
    """Return the arguments of every call of the inner model during generation."""
    recorded = []
    hook = model.model.register_forward_pre_hook(
        lambda _, args, kwargs: recorded.append(kwargs), with_kwargs=True
    )
    try:
        model.generate(**sample.inputs, max_new_tokens=3, do_sample=False, **options)
    finally:
        hook.remove()
    return recorded


@cases(("options", "times"), [({}, 1), ({"num_beams": 3}, 3)])
@cases("family", ["qwen2_5_vl", "internvl"])
def test_one_keyword_in_every_step(family, options, times):
    model = converted(family, "mrope_i")
    sample = batch(family, [3, "image", 4], [7])
    recorded = calls(model, sample, **options)
    assert len(recorded) == 3
    for kwargs in recorded:
        assert [name for name in kwargs if name.startswith("vispe")] == [PROMPT]
        assert isinstance(kwargs[PROMPT], PromptPositions)
        assert (
            len(kwargs[PROMPT].table) == len(kwargs[PROMPT].span) == len(kwargs[PROMPT].offset) == 2 * times
        )
    ids = sample.stream.shape[1]
    assert recorded[0][PROMPT].table.shape == (2 * times, 3, ids)


def test_text_has_no_prompt_object():
    model = converted("qwen2_5_vl", "mrope_i")
    for kwargs in calls(model, batch("qwen2_5_vl", [3], [7])):
        assert kwargs.get(PROMPT) is None


def test_rows_and_devices():
    offset = torch.tensor([1.0, 2.0], dtype=torch.float64)
    prompt = PromptPositions(torch.arange(4.0).double().view(2, 1, 2), torch.tensor([[0, 2], [1, 1]]), offset)
    twice = prompt.repeat(2)
    assert twice.offset.tolist() == [1, 1, 2, 2]
    assert twice.span.tolist() == [[0, 2], [0, 2], [1, 1], [1, 1]]
    assert twice.table[:, 0].tolist() == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert twice.token_attributes is None
    assert prompt.to(torch.bfloat16) is prompt
    assert prompt.to("meta").table.device.type == "meta"
    assert prompt.to("meta").table.dtype == torch.float64


@cases("method", [name for name in GENERATION if hasattr(transformers.GenerationMixin, name)])
def test_a_patched_method_of_generation_is_rejected(method):
    model = copy_of("qwen2_5_vl")
    setattr(model, method, lambda *args, **kwargs: None)
    with pytest.raises(UnsupportedHost, match=f"{method} is patched"):
        vispe.convert(model, "mrope_i")


def test_all_overridden_methods_are_compared():
    assert {"_expand_inputs_for_generation", "_validate_model_kwargs", "_get_candidate_generator"} <= {
        *GENERATION
    }
    assert len([name for name in GENERATION if hasattr(transformers.GenerationMixin, name)]) >= 5
