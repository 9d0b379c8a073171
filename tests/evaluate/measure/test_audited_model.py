"""An audit finds its subject as every command does: by a name, from a model, from a segmenter."""

import numpy as np
import pytest
import timm
import torch

from vispe.errors import OptionError, ShapeError, UnsupportedHost
from vispe.evaluate.attention.causal_mask import CausalMask
from vispe.evaluate.audit.measures import choose
from vispe.evaluate.audit.runner import audit
from vispe.evaluate.evaluated import EvaluatedModel, load_evaluated_model
from vispe.evaluate.measure.audited_model import as_audited_model


def test_subject_and_model_give_the_same_host():
    subject = load_evaluated_model("test_vit", weights="random", device="cpu")
    audited, image = as_audited_model(subject), torch.rand(1, 3, 160, 160)
    direct = as_audited_model(subject.features.model, "mine")
    assert audited.title == subject.title
    assert direct.title == "mine"
    assert audited.patch_size == direct.patch_size == 16
    assert torch.equal(audited.maps(image), direct.maps(image))
    assert audited.can == direct.can == {"maps", "pooled", "attention"}


class Bright:
    names = ("bright", "dark")

    def __call__(self, image):
        return np.where(image[0].numpy() > 0.5, 1, 2)


def test_segmenters_give_probabilities_or_labels_one_hot():
    image = torch.rand(2, 3, 6, 8)
    audited = as_audited_model(EvaluatedModel("labels", segmenter=Bright(), names=Bright.names))
    maps = audited.maps(image)
    assert maps.shape == (2, 2, 6, 8)
    assert audited.patch_size == 1
    assert torch.equal(maps[:, 0], (image[:, 0] > 0.5).float())
    assert torch.equal(maps.sum(1), torch.ones(2, 6, 8))
    sure = Bright()
    sure.probabilities = lambda image: image[:2]
    assert torch.equal(as_audited_model(EvaluatedModel("soft", segmenter=sure)).maps(image), image[:, :2])
    assert "attention" not in audited.can
    assert audited.why["attention"].startswith("it is a function")
    with pytest.raises(UnsupportedHost, match="function of images"):
        audited.reinitialized()
    with pytest.raises(OptionError, match="labels without a class count"):
        as_audited_model(EvaluatedModel("labels", segmenter=Bright()))


def test_training_mode_is_refused():
    with pytest.raises(OptionError, match=r"Call model.eval\(\)"):
        as_audited_model(timm.create_model("test_vit"))


def llama(mixing, seed=0):
    """A language model whose layers average what tokens have in common, or mix nothing."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 1}
    net = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=50)).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        table = net.model.embed_tokens.weight
        # in channels that the rotary embedding turns slowly, so that it does not wash it out
        table.copy_(torch.randn(50, 32) + 0.7 * (torch.arange(32) % 16 > 7))
        for layer in net.model.layers:
            attention = layer.self_attn
            parts = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
            for part, scale in zip(parts, (0.5, 0.5, 3 * mixing, 1.0), strict=True):
                part.weight.copy_(scale * torch.eye(32))
            layer.mlp.down_proj.weight.zero_()
    return net


def texts(count=16, length=48):
    return [
        torch.randint(50, (1, 1, length), generator=torch.Generator().manual_seed(k)) for k in range(count)
    ]


def test_a_language_model_reports_what_its_mask_does():
    actual = {
        mixing: audit(as_audited_model(llama(mixing)), texts(), [CausalMask()]).findings[0]
        for mixing in (1.0, 0.0)
    }
    assert actual[1.0].verdict == "yes"
    assert actual[1.0].outcome.per_layer[-1] > 0.1
    # without values the mask has nothing to average
    assert actual[0.0].verdict == "no"


def test_a_language_model_reads_ids_and_makes_no_maps():
    audited, ids, captured = as_audited_model(llama(1.0)), texts(1)[0][None], []
    assert audited.can == {"attention", "causal"}
    audited.watch(ids, captured.append)
    audited.watch(ids.flatten(1), captured.append)
    assert torch.equal(captured[0].call.q, captured[3].call.q)
    reasons = audit(audited, texts(2), choose(["pattern", "shift"])).refused
    assert all("reads token ids" in reason for _, reason in reasons.values())
    for wrong in (ids.float(), ids + 50, ids.expand(1, 3, 1, -1)):
        with pytest.raises(ShapeError, match=r"int64 \(b, 1, 1, n\) from 0 to 49"):
            audited.watch(wrong, captured.append)
    with pytest.raises(UnsupportedHost, match="has no feature maps"):
        audited.maps(ids)
    with pytest.raises(UnsupportedHost, match="cannot be removed"):
        audited.without()


def test_reinitialisation_draws_every_weight_of_a_loaded_language_model(tmp_path):
    net = llama(1.0)
    net.save_pretrained(tmp_path)
    loaded = type(net).from_pretrained(tmp_path)
    reinitialized = as_audited_model(loaded).reinitialized(1)
    assert reinitialized.unchanged == ()
    # as transformers draws them, not as torch does
    assert reinitialized.model.model.embed_tokens.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_reinitialisation_names_unchanged_weights():
    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.shift = torch.nn.Conv2d(3, 4, 8, 8), torch.nn.Parameter(torch.arange(4.0))

        def forward(self, images):
            return self.conv(images) + self.shift[:, None, None]

    audited = as_audited_model(Own().eval())
    assert audited.unchanged == ()
    assert audited.reinitialized(3).unchanged == ("shift",)
