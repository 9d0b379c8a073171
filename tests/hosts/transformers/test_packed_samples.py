"""Packed samples in a call: isolated with every cache and attention, or rejected, or a warning."""

import warnings

import pytest
import torch

import vispe
from tests.cases import cases
from tests.hosts.transformers.more import LACKING, text_part, vision_part
from tests.hosts.transformers.samples import TYPED, model_of
from tests.hosts.transformers.tiny import CACHE, IMAGE, batch
from vispe.errors import InputError, UnsupportedHost
from vispe.hosts.transformers.language.families import language_model_of
from vispe.hosts.transformers.packed_samples import (
    Samples,
    flash_arguments,
    isolated,
    sample_numbers,
    samples_of,
)

transformers = pytest.importorskip("transformers")
SOME = ("qwen2_vl", "llava", "gemma3")
TOKENS = torch.tensor([[5, 9, 8, 7, 21, 22, 23, 24, 25], [31, 32, 33, 34, 35, 36, 41, 42, 43]])
IDS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 0, 1, 2]])
PARTS = (0, 0, 4), (0, 4, 9), (1, 0, 6), (1, 6, 9)  # row, start, end


def checked(model, **options):
    """Assert that every part of `TOKENS` has the logits of a separate call."""
    with torch.no_grad():
        actual = model(input_ids=TOKENS, position_ids=IDS, **options)
        for row, start, end in PARTS:
            expected = model(input_ids=TOKENS[row : row + 1, start:end]).logits[0]
            torch.testing.assert_close(actual.logits[row, start:end], expected, atol=2e-5, rtol=1e-5)
    return actual


@cases("attention", ["sdpa", "eager"])
@cases("family", SOME)
def test_isolation_does_not_depend_on_the_cache(family, attention):
    model = vispe.convert(model_of(family, attention), "mrope_i")
    text = model.config.get_text_config()
    for options in (
        {},
        {"use_cache": True},
        {"use_cache": False},
        {CACHE: transformers.DynamicCache(config=text)},
        {CACHE: transformers.StaticCache(text, max_cache_len=12)},
    ):
        checked(model, **options)
    checked(model.train())


@cases("options", [{"late_rotation": True}, {"parallel": "pine"}, {"self_extend": (2, 4)}], ids=str)
def test_isolation_where_attention_rotates(options):
    checked(vispe.convert(model_of("llava"), "vrope", **options))


def test_isolation_with_checkpointed_layers():
    model = vispe.convert(model_of("qwen2_vl"), "vrope").train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    embedded = model.get_input_embeddings()(TOKENS).detach().requires_grad_()
    model(inputs_embeds=embedded, position_ids=IDS).logits[0, 4:].sum().backward()
    assert not embedded.grad[0, :4].any()
    assert embedded.grad[0, 4:].any(-1).all()


@pytest.mark.slow
def test_isolation_in_compiled_programs():
    """They cannot branch on values, so rows are always treated as packed."""
    model = vispe.convert(model_of("llava"), "mrope_i")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        expected = checked(model).logits
        torch.testing.assert_close(compiled(input_ids=TOKENS, position_ids=IDS).logits, expected)
        plain = torch.arange(9).expand(2, -1)
        expected = model(input_ids=TOKENS).logits
        actual = compiled(input_ids=TOKENS, position_ids=plain).logits
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_masks_of_packed_samples_are_made_once_for_all_layers():
    model = vispe.convert(model_of("gemma3"), "mrope_i")
    masks = []
    for layer in language_model_of(model.model).layers:
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
        )
    with torch.no_grad():
        model(input_ids=TOKENS, position_ids=IDS)
    assert len({id(mask) for mask in masks}) == 2  # one for each kind of layers


@cases("side", ["left", "right"])
def test_a_mask_that_hides_packed_samples_warns(side):
    model = vispe.convert(model_of("llava"), "mrope_i")
    ones = torch.ones_like(TOKENS)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        for _ in range(3):
            model(input_ids=TOKENS, position_ids=IDS, attention_mask=ones)
    caught = [w for w in caught if "not separated" in str(w.message)]
    assert [w.filename for w in caught] == [__file__]
    sample = batch("llava", [4, "image", 2], [3], padding=side)
    mask = sample["attention_mask"]
    for ids in ((mask.cumsum(1) - 1).clamp(min=0), (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)):
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("error")
            model(**sample.inputs, position_ids=ids)


def test_a_custom_mask_is_used_unchanged():
    model = vispe.convert(model_of("llava"), "mrope_i")
    with torch.no_grad():
        recorded = torch.ones(9, 9, dtype=torch.bool).tril()[None, None]
        actual = model(
            input_ids=TOKENS, position_ids=IDS, attention_mask=recorded.expand(2, -1, -1, -1)
        ).logits
        assert (actual - model(input_ids=TOKENS, position_ids=IDS).logits).abs().max() > 1e-3


def test_a_cache_of_packed_samples_is_refused():
    model = vispe.convert(model_of("llava"), "mrope_i")
    one = torch.tensor([[7], [8]])
    with torch.no_grad():
        cache = model(input_ids=TOKENS, position_ids=IDS)[CACHE]
        with pytest.raises(InputError, match="The cache must contain one sample per row"):
            model(input_ids=one, **{CACHE: cache})
        cache = model(input_ids=TOKENS)[CACHE]
        with pytest.raises(InputError, match="restart within a row of tokens that follow cached tokens"):
            model(input_ids=TOKENS, position_ids=IDS, **{CACHE: cache})


def test_attention_that_takes_no_mask_is_refused():
    model = vispe.convert(model_of("llava"), "mrope_i")
    transformers.AttentionInterface.register("mine", lambda *args, **kwargs: None)
    language_model_of(model.model).config._attn_implementation = "mine"
    with torch.no_grad(), pytest.raises(UnsupportedHost, match=r"got 'mine'.*set_attn_implementation"):
        model(input_ids=TOKENS, position_ids=IDS)


def test_flash_attention_receives_sample_lengths():
    text = language_model_of(vispe.convert(model_of("llava"), "mrope_i").model)
    text.config._attn_implementation = "flash_attention_2"
    settings = flash_arguments(text, samples_of(IDS))
    assert settings["cu_seq_lens_q"].tolist() == [0, 4, 9, 15, 18]
    assert settings["cu_seq_lens_q"].dtype == torch.int32
    assert settings["max_length_k"] == 6
    assert isolated(None, samples_of(IDS), text.layers[0], None, torch.float32) is None


def test_block_masks_of_flex_attention():
    from torch.nn.attention.flex_attention import create_block_mask, create_mask

    layer = language_model_of(vispe.convert(model_of("llava"), "mrope_i").model).layers[0]
    layer.self_attn.config._attn_implementation = "flex_attention"
    causal = create_block_mask(lambda b, h, q, k: q >= k, B=2, H=None, Q_LEN=9, KV_LEN=12, device="cpu")
    actual = isolated(causal, samples_of(IDS), layer, None, torch.float32)
    dense = create_mask(actual.mask_mod, 2, 1, 9, 12, device="cpu")
    number = sample_numbers(IDS)
    expected = torch.ones(9, 12, dtype=torch.bool).tril() & torch.zeros(2, 1, 1, 12, dtype=torch.bool)
    same = number[:, None, :, None] == number[:, None, None]
    expected = torch.nn.functional.pad(same & torch.ones(9, 9, dtype=torch.bool).tril(), (0, 3))
    assert torch.equal(dense, expected)


def test_numbers_of_samples():
    assert sample_numbers(torch.tensor([[0, 1, 0, 0, 1, 5, 6]])).tolist() == [[0, 0, 1, 2, 2, 3, 3]]
    assert samples_of(torch.tensor([[3, 4, 5]])) is None
    assert samples_of(torch.tensor([[0]])) is None
    assert isinstance(samples_of(torch.tensor([[0, 0]])), Samples)


@cases("family", [family for family in TYPED if family not in LACKING])
def test_adjacent_images_of_two_samples(family):
    """Image tokens attend to their entire block, which must not extend into the next sample."""
    model = vispe.convert(model_of(family), "mrope_i")
    tokens = torch.tensor([[4, 5, *[IMAGE] * 9, *[IMAGE] * 9, 7, 8]])
    ids = torch.cat([torch.arange(11), torch.arange(11)])[None]
    name = "token_type_ids" if family == "gemma3" else "mm_token_type_ids"
    embedded = model.get_input_embeddings()(torch.arange(10, 32)[None]).detach()
    axes = model.model.vispe_scheme.axes
    rows = torch.cat([ids[None].double(), ids.double().expand(axes, 1, -1)])

    def logits(part):
        types = {name: (tokens[:, part] == IMAGE).long()}
        return model(inputs_embeds=embedded[:, part], position_ids=rows[..., part], **types).logits

    with torch.no_grad():
        actual = logits(slice(None))
        for part in (slice(0, 11), slice(11, 22)):
            torch.testing.assert_close(actual[:, part], logits(part), atol=2e-5, rtol=1e-5)


@cases("attention", ["sdpa", "eager"])
def test_layers_that_receive_the_last_tokens_only(attention):
    """Gemma 4: the last layers reuse keys of earlier ones, and masks are cut to the logits that are stored."""
    kinds = ["sliding_attention", "full_attention"] * 3
    part = text_part("gemma4") | {"num_hidden_layers": 6, "num_kv_shared_layers": 2, "layer_types": kinds}
    config = transformers.Gemma4Config(
        text_config=part, vision_config=vision_part("gemma4"), image_token_id=IMAGE
    )
    torch.manual_seed(0)
    model = transformers.Gemma4ForConditionalGeneration(config).eval()
    model.set_attn_implementation(attention)
    vispe.convert(model, "mrope_i")
    expected = checked(model).logits
    for remaining in (1, 2):
        with torch.no_grad():
            actual = model(input_ids=TOKENS, position_ids=IDS, logits_to_keep=remaining).logits
        torch.testing.assert_close(actual, expected[:, -remaining:], atol=2e-5, rtol=1e-5)
