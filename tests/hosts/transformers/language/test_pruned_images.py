"""Pruned image tokens: the others keep the positions of the full image, generated text those of the full prompt."""

import pytest
import torch

from tests.hosts.transformers.reference import converted
from tests.hosts.transformers.tiny import batch

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
SPECS = ("mrope_i", "vrope", "v2pe", "videorope", "mrope(spatial_reset=true)")
FAMILIES = ("qwen2_5_vl", "internvl")


@pytest.mark.slow
@pytest.mark.parametrize(("family", "spec"), [(family, spec) for family in FAMILIES for spec in SPECS])
def test_a_pruned_image_equals_a_mask_on_its_tokens(family, spec):
    model = converted(family, spec).eval()
    sample = batch(family, [3, "image", 4])
    scheme, stream = model.model.vispe_scheme, sample.stream
    coordinates = scheme.coordinates(stream)
    length = stream.shape[1]
    embeds = torch.randn(1, length, model.config.get_text_config().hidden_size)
    visual = stream.blocks.visual[stream.block]
    keep = ~visual | (torch.arange(length) % 2 == 0)
    assert 0 < int((visual & keep).sum()) < int(visual.sum())
    pruned = {"inputs_embeds": embeds[:, keep], "position_ids": coordinates.ids[..., keep]}
    mask = (torch.ones(length, length, dtype=torch.bool).tril() & keep)[None, None]
    with torch.no_grad():
        logits = model(**pruned).logits
        masked = model(inputs_embeds=embeds, position_ids=coordinates.ids, attention_mask=mask).logits
        torch.testing.assert_close(logits, masked[:, keep], rtol=1e-4, atol=1e-4)
        words = model.generate(**pruned, max_new_tokens=3, do_sample=False)
        inputs = dict(pruned)
        for step in range(3):
            word = model(**inputs, use_cache=False).logits[:, -1:].argmax(-1)
            assert word.item() == words[0, step].item()
            inputs["inputs_embeds"] = torch.cat(
                [inputs["inputs_embeds"], model.get_input_embeddings()(word)], 1
            )
            inputs["position_ids"] = torch.cat([pruned["position_ids"], coordinates.decode(step + 1)], -1)
