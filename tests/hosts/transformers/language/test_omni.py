"""The thinkers of Qwen2.5-Omni and Qwen3-Omni: audio is text, and frames have timestamps (TMRoPE)."""

import copy

import pytest
import torch

import vispe
from tests.cases import cases
from tests.hosts.transformers.language.test_more_families import converted, logits, own_of, prompt
from tests.hosts.transformers.more import AUDIO, AUDIO_END, AUDIO_START, OMNI, stock
from tests.hosts.transformers.tiny import END, IMAGE, PAD, START, VIDEO
from tests.products import partly
from vispe.errors import InputError
from vispe.multimodal import Stream, Text, Video, create_scheme

if not OMNI:
    pytest.skip("this transformers has no model inside of Omni's thinkers", allow_module_level=True)
omni = cases("family", OMNI)


def draw(number, generator):
    return int(torch.randint(number, (1,), generator=generator))


def batch(family, seed, rows=3, times=None):
    """Return tokens and the further inputs of `get_rope_index` for random rows of text, images, videos and audio."""
    g = torch.Generator().manual_seed(seed)
    images, videos, seconds, audio, samples = [], [], [], [], []
    for row in range(rows):
        ids = torch.randint(1, 250, (1 + draw(4, g),), generator=g).tolist()
        for kind in [draw(4, g) for _ in range(draw(5, g))] + ([0, 1] if row == 0 else []):
            h, w = 2 * (1 + draw(3, g)), 2 * (1 + draw(3, g))
            if kind == 0:
                images.append([1, h, w])
                ids += [START, *[IMAGE] * (h * w // 4), END]
            elif kind == 1:
                t = 1 + draw(6, g)
                videos.append([t, h, w])
                seconds.append(float(torch.rand(1, generator=g)) * 3 if times is None else times)
                ids += [START, *[VIDEO] * (t * h * w // 4), END]
            elif kind == 2:
                length = 10 + draw(150, g)
                audio.append(length)
                ids += [AUDIO_START, *[AUDIO] * audio_tokens(family, length), AUDIO_END]
            ids += torch.randint(1, 250, (1 + draw(4, g),), generator=g).tolist()
        samples.append(ids)
    longest = max(map(len, samples))
    tokens, mask = torch.full((rows, longest), PAD), torch.zeros(rows, longest, dtype=torch.long)
    for row, ids in enumerate(samples):
        where = slice(longest - len(ids), None) if seed % 2 else slice(0, len(ids))
        tokens[row, where], mask[row, where] = torch.tensor(ids), 1
    grids = {"image_grid_thw": torch.tensor(images), "video_grid_thw": torch.tensor(videos)}
    more = {"audio_seqlens": torch.tensor(audio), "second_per_grids": torch.tensor(seconds)}
    return tokens, {"attention_mask": mask, **grids, **more}


def audio_tokens(family, length):
    """Return the number of tokens for frames of a spectrogram, computed by the model."""
    if family == "qwen2_5_omni_thinker":
        return ((length - 1) // 2 + 1 - 2) // 2 + 1
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import _get_feat_extract_output_lengths

    return int(
        _get_feat_extract_output_lengths(torch.tensor(length), stock(family).config.audio_config.n_window)
    )


@partly(0.5)
@omni
@cases("seed", range(40))
def test_ids_equal_those_of_the_stock_model(family, seed):
    tokens, sample = batch(family, seed, times=(None, 1.0, 0.5, 0.08, 2 / 3)[seed % 5])
    mask = sample["attention_mask"].bool()
    expected, delta = copy.deepcopy(stock(family)).model.get_rope_index(tokens, **sample)
    model = converted(family, own_of(family))
    for requested in (model, model.model):
        actual, next_delta = requested.get_rope_index(tokens, **sample)
        if family == "qwen2_5_omni_thinker":  # integers
            assert actual.dtype == expected.dtype
            assert torch.equal(actual[:, mask], expected[:, mask])
            assert torch.equal(next_delta, delta)
        else:  # fractions, which the model adds up in float32
            torch.testing.assert_close(actual[:, mask].float(), expected[:, mask], rtol=3e-7, atol=1e-5)
            torch.testing.assert_close(next_delta.float(), delta.float(), rtol=3e-7, atol=1e-4)
    if seed % 5 == 1:  # a second from frame to frame
        assert torch.equal(actual[:, mask].double(), expected[:, mask].double())


@pytest.mark.slow
@omni
def test_positions_of_audio_and_videos_equal_the_stock_model(family):
    inputs = dict(prompt(family, video=True).inputs)
    length = 41
    count = audio_tokens(family, length)
    sound = [AUDIO_START, *[AUDIO] * count, AUDIO_END]
    ids = torch.tensor([[*inputs["input_ids"][0].tolist(), *sound, 9, 7]])
    inputs |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs["input_features"] = torch.randn(1, 20, length)
    inputs["feature_attention_mask"] = torch.ones(1, length, dtype=torch.long)
    model, before = converted(family, own_of(family)), copy.deepcopy(stock(family))
    expected = logits(before, inputs)
    actual = logits(model, inputs)
    if family == "qwen2_5_omni_thinker":
        assert torch.equal(actual, expected)
    else:  # 18.75 positions from frame to frame
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    tokens = (m.generate(**inputs, max_new_tokens=4, do_sample=False) for m in (model, before))
    assert torch.equal(*tokens)
    other = converted(family, "vrope")
    segments = [Text(3), Video(2, 2, 2), Text(2 + count + 4)]
    ids = create_scheme("vrope").coordinates(Stream.of([segments])).ids
    torch.testing.assert_close(
        logits(other, inputs), logits(other, inputs | {"position_ids": ids}), rtol=1e-5, atol=1e-5
    )


@omni
def test_audio_inside_videos_is_rejected(family):
    inputs = prompt(family, video=True).inputs | {"use_audio_in_video": True}
    model = converted(family, own_of(family))
    with pytest.raises(InputError, match="interleaves audio with the frames of a video"):
        model(**inputs)
    with pytest.raises(InputError, match="interleaves audio with the frames of a video"):
        model.get_rope_index(
            inputs["input_ids"], video_grid_thw=inputs["video_grid_thw"], use_audio_in_video=True,
            attention_mask=inputs["attention_mask"], second_per_grids=torch.tensor([1.0]),
        )  # fmt: skip
    images = prompt(family).inputs | {"use_audio_in_video": True}  # nothing is woven there
    assert torch.equal(logits(model, images), logits(copy.deepcopy(stock(family)), images))


@omni
def test_restore_recovers_the_class_of_the_head(family):
    model = vispe.restore(converted(family, "vrope"))
    assert type(model) is type(stock(family))
    assert type(model.model) is type(stock(family).model)


def test_timestamps_of_both_versions():
    stream = Stream.of([[Text(2), Video(3, 1, 1, seconds=0.75), Text(1)]])
    integers, fractions = (
        create_scheme(name).coordinates(stream).ids[0, 0].tolist() for name in ("tmrope", "tmrope_i")
    )
    assert integers == [0, 1, 2, 20, 39, 40]
    assert fractions == [0, 1, 2, 20.75, 39.5, 40.5]
