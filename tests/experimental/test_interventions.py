"""Interventions: their effect against explicit attention, unchanged parts, and removal."""

import pytest
import timm
import torch
from timm.models.eva import Eva
from torch import nn

from tests.cases import cases
from tests.hosts.helpers import image, shake, tiny
from vispe.errors import OptionError, ShapeError, UnsupportedHost
from vispe.experimental.interventions import calibrated, scale_channel
from vispe.hosts.convert import convert
from vispe.hosts.slot_calibration import calibrate, slot_curve

transformers = pytest.importorskip("transformers", reason="vispe[vlm] is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


SMALL = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}


def decoder(kind="Llama", implementation="sdpa"):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "vocab_size": 50}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": None}
    config = getattr(transformers, f"{kind}Config")(**sizes, bos_token_id=None)
    config._attn_implementation = implementation
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return model


def words(*shape):
    return torch.randint(1, 50, shape or (2, 9), generator=torch.Generator().manual_seed(3))


def vit(spec=None, **options):
    model = tiny(depth=4, **options)
    return model if spec is None else convert(model, spec).eval()


def eva():
    torch.manual_seed(0)
    return shake(Eva(**SMALL, qkv_fused=False, use_rot_pos_emb=True, global_pool="token")).eval()


def hooks(model):
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called", "_backward_hooks")
    return sum(len(getattr(m, kind)) for m in model.modules() for kind in kinds)


ITEM = torch.tensor([-1, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4])
DUMMY = torch.tensor([0.1, 0.05, 0.06, 0.02, 0.08])
WORDS = torch.tensor([-1, 0, 0, 0, 1, 1, 1, -1, -1])

STEERS = {
    "vit": (vit, image, lambda m: scale_channel(m, 3, -1.0)),
    "vit with an encoding": (lambda: vit("alibi2d"), image, lambda m: scale_channel(m, 3, -1.0)),
    "vit, class token": (vit, image, lambda m: scale_channel(m, 3, -1.0, reader=True)),
    "vit, calibrated": (vit, image, lambda m: calibrated(m, ITEM, DUMMY, temperature=0.1)),
    "vit with an encoding, calibrated": (
        lambda: vit("rope_axial"),
        image,
        lambda m: calibrated(m, ITEM, DUMMY, temperature=0.1),
    ),
    "eva": (eva, lambda: image(2, 3, 16, 16), lambda m: scale_channel(m, 3, -1.0)),
    "eva, calibrated": (
        eva,
        lambda: image(2, 3, 16, 16),
        lambda m: calibrated(m, ITEM[:5], DUMMY[:2], temperature=0.1),
    ),
    "decoder": (decoder, words, lambda m: scale_channel(m, 3, -1.0)),
    "decoder, all tokens": (decoder, words, lambda m: scale_channel(m, 3, -1.0, reader=False)),
    "decoder, calibrated": (decoder, words, lambda m: calibrated(m, WORDS, DUMMY[:2], temperature=0.1)),
}


def result(model, x):
    actual = model(x)
    return actual if isinstance(actual, torch.Tensor) else actual.logits


@cases("case", STEERS)
@torch.no_grad()
def test_interventions_are_removed(case):
    make, inputs, steer = STEERS[case]
    model, x = make(), inputs()
    before, registered = result(model, x), set(transformers.AttentionInterface())
    with steer(model):
        assert not torch.allclose(result(model, x), before, atol=1e-4)
    assert torch.equal(result(model, x), before)
    with pytest.raises(RuntimeError, match="a reason"), steer(model):
        raise RuntimeError("a reason")

    def fails(*_):
        raise RuntimeError("inside")

    # in the middle of a layer
    last = [m for m in model.modules() if isinstance(m, nn.Linear) and m.in_features != m.out_features][-2]
    handle = last.register_forward_hook(fails)
    with pytest.raises(RuntimeError, match="inside"), steer(model):
        result(model, x)
    handle.remove()
    assert hooks(model) == 0
    assert torch.equal(result(model, x), before)
    assert set(transformers.AttentionInterface()) == registered


@torch.no_grad()
@cases("reader", [False, True])
def test_scaling_in_a_vit_equals_explicit_attention(reader):
    model = vit()
    attn, x = model.blocks[1].attn, torch.randn(2, 16, 32)
    scaled = x.clone()
    scaled[..., 5] *= -0.5
    q, k, v = (
        torch.nn.functional.linear(y, w, b).unflatten(-1, (4, 8)).transpose(1, 2)
        for y, w, b in zip((scaled, scaled, x), attn.qkv.weight.chunk(3), attn.qkv.bias.chunk(3), strict=True)
    )
    expected = attn.proj(((q @ k.mT / 8**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2))
    plain, calls = attn(x), []
    with scale_channel(model, 5, -0.5, layers=[1], reader=reader):
        handle = attn.qkv.register_forward_hook(lambda m, a, out: calls.append(out))
        actual = attn(x)
        handle.remove()
    assert torch.allclose(actual[:, 0], expected[:, 0], atol=1e-5)
    assert torch.allclose(actual[:, 1:], (plain if reader else expected)[:, 1:], atol=1e-5)
    # values are those of the layer, bit by bit
    assert torch.equal(calls[-1][..., 64:], attn.qkv(x)[..., 64:])


def explicit_attention(module, x, scaled, rotary, change=lambda attn: attn):
    """Return the attention of the last token of a decoder layer."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k = (f(scaled).unflatten(-1, (-1, 8)).transpose(1, 2) for f in (module.q_proj, module.k_proj))
    v = module.v_proj(x).unflatten(-1, (-1, 8)).transpose(1, 2).repeat_interleave(2, 1)
    q, k = apply_rotary_pos_emb(q, k, *rotary)
    attn = (q[:, :, -1:] @ k.repeat_interleave(2, 1).mT / 8**0.5).softmax(-1)
    return module.o_proj((change(attn) @ v).transpose(1, 2).flatten(2))[:, 0]


def layer_inputs(model, number, x):
    calls = []
    module = model.model.layers[number].self_attn
    handle = module.register_forward_pre_hook(lambda m, a, kw: calls.append(kw), with_kwargs=True)
    model(x)
    handle.remove()
    return module, calls[0]["hidden_states"], calls[0]["position_embeddings"]


@torch.no_grad()
def test_scaling_in_a_decoder_equals_explicit_attention():
    model, x = decoder(), words()
    module, hidden, rotary = layer_inputs(model, 2, x)
    plain = module(hidden_states=hidden, position_embeddings=rotary, attention_mask=None)[0]
    scaled = hidden.clone()
    scaled[..., 7] *= 0.0
    with scale_channel(model, 7, 0.0, layers=[2]):
        actual = module(hidden_states=hidden, position_embeddings=rotary, attention_mask=None)[0]
        generated = model.generate(x, max_new_tokens=3, do_sample=False, use_cache=False)
        with pytest.raises(
            ShapeError, match=r"got a cache of 9 tokens\. Call the model with use_cache=False"
        ):
            model.generate(x, max_new_tokens=3, do_sample=False)
        with pytest.raises(ShapeError, match="Pad on the left"):
            model(x, attention_mask=torch.arange(9).expand(2, 9) < 8)
        logits = model(x).logits
    assert torch.allclose(actual[:, -1], explicit_attention(module, hidden, scaled, rotary), atol=1e-5)
    assert torch.equal(actual[:, :-1], plain[:, :-1])
    assert torch.equal(generated[:, 9], logits[:, -1].argmax(-1))


@cases("kind", ["Llama", "Qwen2", "Qwen3", "Mistral"])
@cases("implementation", ["sdpa", "eager"])
@torch.no_grad()
def test_decoders_are_calibrated_in_the_last_half(kind, implementation):
    model, x = decoder(kind, implementation), words()
    before, steered = [], []
    layers = model.model.layers
    handles = [
        layer.self_attn.register_forward_hook(lambda m, a, out: before.append(out[0])) for layer in layers
    ]
    model(x)
    for handle in handles:
        handle.remove()
    with calibrated(model, WORDS, DUMMY[:2], temperature=0.1):
        handles = [
            layer.self_attn.register_forward_hook(lambda m, a, out: steered.append(out[0]))
            for layer in layers
        ]
        model(x)
    for handle in handles:
        handle.remove()
    assert torch.equal(before[0], steered[0])
    assert torch.equal(before[1], steered[1])
    # all but the reader attend as before in the first layer that is steered
    assert torch.allclose(before[2][:, :-1], steered[2][:, :-1], atol=1e-6)
    assert not torch.allclose(before[2][:, -1], steered[2][:, -1], atol=1e-4)


@torch.no_grad()
def test_calibration_in_a_decoder_equals_explicit_attention():
    model, x = decoder(), words()
    module, hidden, rotary = layer_inputs(model, 3, x)
    change = lambda attn: calibrate(attn, WORDS, DUMMY[:2], 0.1).attention.float()  # noqa: E731
    with calibrated(model, WORDS, DUMMY[:2], temperature=0.1, layers=[3]):
        actual = module(hidden_states=hidden, position_embeddings=rotary, attention_mask=None)[0]
        # tokens that are added are of no item, with a cache and without one
        cached = model.generate(x, max_new_tokens=4, do_sample=False)
        assert torch.equal(cached, model.generate(x, max_new_tokens=4, do_sample=False, use_cache=False))
        # padding on the left is masked
        padded = torch.cat([torch.zeros(2, 2, dtype=torch.int64), x], 1)
        mask = (padded > 0).long()
    assert torch.allclose(
        actual[:, -1], explicit_attention(module, hidden, hidden, rotary, change), atol=1e-5
    )
    with calibrated(model, torch.cat([torch.tensor([-1, -1]), WORDS]), DUMMY[:2], temperature=0.1):
        logits = model(padded, attention_mask=mask).logits[:, -1]
    with calibrated(model, WORDS, DUMMY[:2], temperature=0.1):
        assert torch.allclose(logits, model(x).logits[:, -1], atol=1e-4)


@cases("family", ["qwen2_5_vl", "llava"])
@torch.no_grad()
def test_the_language_model_of_a_vision_language_model_is_changed(family):
    from tests.hosts.transformers.tiny import batch, make

    model, inputs = make(family), batch(family, (3, "image", 4)).inputs
    before = model(**inputs).logits
    item = torch.tensor([0, 0, 1, 1])
    for steer in (scale_channel(model, 3, -1.0), calibrated(model, item, DUMMY[:2], temperature=0.1)):
        with steer:
            steered = model(**inputs).logits
        # the reader alone
        assert torch.equal(steered[:, :-1], before[:, :-1])
        assert not torch.allclose(steered[:, -1], before[:, -1], atol=1e-4)
    assert torch.equal(model(**inputs).logits, before)


@torch.no_grad()
def test_calibration_in_a_vit_equals_explicit_attention():
    model = vit()
    attn, x = model.blocks[3].attn, torch.randn(2, 16, 32)
    q, k, v = attn.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
    weights = (q @ k.mT / 8**0.5).softmax(-1)
    row = calibrate(weights[:, :, 0], ITEM, DUMMY, 0.1).attention
    assert slot_curve(row, ITEM).sum(-1).numpy() == pytest.approx(
        slot_curve(weights[:, :, 0], ITEM).sum(-1).numpy(), abs=1e-6
    )
    weights[:, :, 0] = row.float()
    expected = attn.proj((weights @ v).transpose(1, 2).flatten(2))
    with calibrated(model, ITEM, DUMMY, temperature=0.1):
        assert torch.allclose(attn(x), expected, atol=1e-5)
    assert attn.fused_attn


@torch.no_grad()
def test_outputs_are_equal_without_a_change():
    for make, x in ((vit, image()), (decoder, words())):
        model = make()
        with scale_channel(model, 0, 1.0):
            actual = result(model, x)
        assert torch.allclose(actual, result(model, x), atol=1e-5)


def test_gradients_flow():
    model = decoder()
    with scale_channel(model, 3, 0.5), calibrated(model, WORDS, DUMMY[:2], temperature=0.1):
        model(words()).logits[:, -1].sum().backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad.isfinite().all()


def test_errors():
    for model in (
        nn.Linear(2, 2),
        transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=9)),
        timm.create_model("test_convnext"),
        tiny(block_fn=timm.models.vision_transformer.ParallelScalingBlock),
        Eva(**SMALL, qkv_fused=True),
    ):
        for steer in (lambda m: scale_channel(m, 0, 0.0), lambda m: calibrated(m, ITEM, DUMMY)):
            with pytest.raises(UnsupportedHost, match="Interventions need"), steer(model):
                pass
    headless = vit(class_token=False, global_pool="avg")
    with (
        pytest.raises(UnsupportedHost, match="needs a class token in all blocks"),
        scale_channel(headless, 0, 0.0, reader=True),
    ):
        pass
    with (
        pytest.raises(UnsupportedHost, match="needs a class token in all blocks"),
        calibrated(headless, ITEM, DUMMY),
    ):
        pass
    with (
        pytest.raises(OptionError, match="channel must be within 0 to 31, got 32"),
        scale_channel(vit(), 32, 0.0),
    ):
        pass
    for layers in ([4], []):
        with (
            pytest.raises(OptionError, match="layers must be within 0 to 3"),
            scale_channel(vit(), 0, 0.0, layers=layers),
        ):
            pass
    with (
        pytest.raises(ShapeError, match="each of 5 items, got 4"),
        calibrated(vit(), ITEM, DUMMY[:4]),
    ):
        pass
    steered = vit()
    with (
        pytest.raises(ShapeError, match="one index per token, 16, got 15"),
        calibrated(steered, ITEM[:-1], DUMMY),
    ):
        steered(image())
    flash = decoder()
    flash.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedHost, match="must be sdpa or eager"), calibrated(flash, WORDS, DUMMY[:2]):
        pass
