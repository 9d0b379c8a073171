"""Schemes in serving engines: rows of the table are coordinates, and an engine returns the output of the model."""

import json

import pytest
import torch
from torch import nn

from tests.cases import cases
from tests.hosts.transformers.engine import Engine
from tests.hosts.transformers.reference import converted
from tests.hosts.transformers.tiny import QWEN, VIDEO, batch, make
from tests.products import partly
from vispe.errors import InputError, UnsupportedCombination, UnsupportedHost
from vispe.hosts.transformers.serving import load_positions, serve_positions
from vispe.multimodal import Image, Stream, Text, Video, create_scheme, list_schemes
from vispe.multimodal.serving import TableRows

SMALL = (8, 8, 8)
REFUSED = {
    "bilevel": "a scheme with one counter, got bilevel with 2",
    "mhrope": "the same axes in all heads, got mhrope",
    "tad_rope": "text that advances by one on all axes per token, got tad_rope",
}
ROUNDED = {"circlerope", "tmrope_i", "v2pe"}
SCHEMES = [name for name in list_schemes() if name not in REFUSED]
# no sections with the axis of a pair
LAYERED = [
    "ernie_vl",
    "hope_vlm",
    "mmrope",
    "ppe",
    "videorope",
    "vrope",
    "xdrope",
]


def row(family, *items, seed=1):
    """Return inputs and grids of one prompt."""
    sample = batch(family, list(items), seed=seed)
    grids = {k: sample.inputs[k] for k in ("image_grid_thw", "video_grid_thw") if k in sample.inputs}
    if family == "qwen2_5_vl" and "video_grid_thw" in grids:
        grids["second_per_grid_ts"] = sample["second_per_grid_ts"]
    return sample, grids


def embedded(model, sample):
    """Return the input embeddings (s, width) of the language model."""
    recorded = []
    text = model.model.language_model
    hook = text.register_forward_pre_hook(
        lambda m, a, k: recorded.append(k["inputs_embeds"]), with_kwargs=True
    )
    with torch.no_grad():
        model(**sample.inputs)
    hook.remove()
    return recorded[0][0]


def rounded(served, sample, grids, more):
    """Return the rounded coordinates of a prompt and its continuation in the table."""
    ids, delta = served.positions(sample["input_ids"][0].tolist(), **grids)
    after = torch.arange(ids.shape[1], ids.shape[1] + more) + delta
    ids = torch.cat([ids, after.expand(len(ids), -1)], 1)
    return {"position_ids": served.rows.values()[ids[: served.rows.scheme.axes, None]]}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("family", QWEN)
def test_rows_have_the_coordinates_of_the_converted_model(family, name):
    sample, grids = row(family, 3, "image", 2, "video", 1, "wide", 2)
    model = converted(family, name)
    served = serve_positions(model, positions=512, grid_thw=SMALL, nearest=name in ROUNDED)
    ids, delta = served.positions(sample["input_ids"][0].tolist(), **grids)
    expected, _ = model.model.get_rope_index(**sample.without("pixel_values", "pixel_values_videos"))
    values = served.rows.values()[ids]
    wide = expected[:, 0].double().expand_as(values) if len(expected) == 1 else expected[:, 0].double()
    near = 1 / 128 if name in ROUNDED else 1e-9
    torch.testing.assert_close(values, wide, rtol=0, atol=near)
    # what an engine gives token after token is where the scheme goes on
    coordinates = served.rows.scheme.coordinates(sample.stream).decode(5)[:, 0]
    after = served.rows.values()[
        torch.arange(len(sample["input_ids"][0]), len(sample["input_ids"][0]) + 5) + delta
    ]
    torch.testing.assert_close(after.expand_as(coordinates), coordinates, rtol=0, atol=near)


@cases("name", LAYERED[:1])
def test_a_rotary_layer_with_two_names(name, tmp_path):
    stock = make("qwen2_vl")
    serve_positions(converted("qwen2_vl", name), positions=64, grid_thw=SMALL).save(tmp_path)
    engine = Engine(stock.model.language_model, stock.lm_head, 64)
    engine.inner = nn.Module()
    engine.inner.rotary_emb = engine.rotary_emb
    # a module that holds the layer and has two names itself
    engine.alias = engine.inner
    names = ["rotary_emb", "inner.rotary_emb", "alias.rotary_emb"]
    assert load_positions(tmp_path).install(engine) == names
    assert {type(part.rotary_emb).__name__ for part in (engine, engine.inner)} == {"TableRotary"}


@partly(0.5)
@cases("chunk", [3, 64])
@cases("name", ["mrope", "mrope_i", "rope1d", *sorted(ROUNDED), *LAYERED])
@cases("family", ["qwen2_vl", "qwen2_5_vl"])
def test_outputs_of_an_engine_equal_the_model(family, name, chunk, tmp_path):
    stock = make(family)
    model = converted(family, name)
    serve_positions(model, positions=512, grid_thw=SMALL, nearest=name in ROUNDED).save(tmp_path)
    served = load_positions(tmp_path)
    engine = Engine(stock.model.language_model, stock.lm_head, chunk)
    assert served.install(engine) == ["rotary_emb"]
    assert (type(engine.rotary_emb).__name__ == "TableRotary") == (name in LAYERED)
    tokens = torch.tensor([[5, 17, 101]])
    counts = []
    for items in ((9, "image", 3, "video", 2), (9, "image", 5), (12,), (9, "image", 3, "video", 2)):
        sample, grids = row(family, *items)
        embeds, before = embedded(stock, sample), engine.computed
        with torch.no_grad():
            actual = engine.serve(
                served, sample["input_ids"][0].tolist(), embeds, tokens[0].tolist(), **grids
            )
            positioned = rounded(served, sample, grids, len(tokens[0])) if name in ROUNDED else {}
            expected = model(**sample.with_tokens(tokens), **positioned).logits[0, -4:]
        torch.testing.assert_close(actual, expected, rtol=2e-4, atol=2e-4)
        counts.append((engine.computed - before, len(embeds) + 3))
    # words before an image, and the whole first prompt, were stored in pages and not computed again
    assert counts[0][0] == counts[0][1]
    assert all(computed <= all_ - 8 for computed, all_ in counts[1:])
    assert counts[3][0] <= 3 + 4


def test_pages_of_text_do_not_depend_on_later_images():
    rows = TableRows.reaching(create_scheme("videorope"), 64, SMALL)
    mixed, text = rows.requests(Stream.of([[Text(4), Image(3, 5), Text(2)], [Text(9)]], padding="right"))
    assert mixed.ids[:, :4].tolist() == [list(range(4))] * 3
    assert text.ids.tolist() == [list(range(9))] * 3
    assert text.delta == 0


@cases("name", ["v2pe", "videorope", "circlerope"])
def test_fractions_and_negative_coordinates_have_separate_rows(name):
    rows = TableRows.reaching(create_scheme(name), 64, SMALL, nearest=True)
    values = rows.values()
    assert len(values) == rows.size == len(values.unique())
    assert float(values.min()) == -rows.below
    actual, away = rows.numbers(values[None])
    assert actual[0].tolist() == list(range(rows.size))
    assert away == 0


@cases("name", sorted(REFUSED))
def test_schemes_that_engines_cannot_continue_are_rejected(name):
    with pytest.raises(UnsupportedCombination, match=f"Engines need {REFUSED[name]}"):
        serve_positions(make("qwen2_vl", kv_heads=4), name, positions=64, grid_thw=SMALL)


def test_errors_have_a_remedy(tmp_path):
    with pytest.raises(UnsupportedHost, match="whose tokens they number one by one"):
        serve_positions(make("llava"), "v2pe", positions=64)
    with pytest.raises(InputError, match=r"no config\.json"):
        serve_positions(tmp_path, "mrope_i")
    with pytest.raises(InputError, match="export-positions"):
        load_positions(tmp_path)
    with pytest.raises(UnsupportedHost, match="must be a vision-language model"):
        serve_positions(torch.nn.Linear(2, 2), "mrope_i")
    with pytest.raises(InputError, match="nearest=True"):
        serve_positions(make("qwen2_vl"), "circlerope", positions=64, grid_thw=SMALL)
    served = serve_positions(make("qwen2_vl"), "videorope", positions=12, grid_thw=SMALL)
    with pytest.raises(InputError, match="positions=13"):
        served.positions([5] * 13)
    with pytest.raises(InputError, match="below=8"):
        served.rows.requests(Stream.of([[Text(1), Image(20, 20)]]))
    with pytest.raises(UnsupportedCombination, match="shared runs"):
        served.rows.requests(Stream.of([[Text(2), Text(1, shared=True), Text(1, shared=True)]]))
    with pytest.raises(InputError, match="mrope_section"):
        served.install(torch.nn.Linear(2, 2))
    served.save(tmp_path)
    with pytest.raises(InputError, match="exist"):
        served.save(tmp_path)


@cases("family", QWEN)
def test_serving_from_a_folder(family, tmp_path):
    """Weights are not read; the scheme, the sections and the frequencies are those of the configuration."""
    model = converted(family, "mrope_i")
    with pytest.warns(UserWarning, match="mrope_i"):
        model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    loaded, direct = (serve_positions(m, positions=99, grid_thw=SMALL) for m in (tmp_path / "model", model))
    assert str(loaded.rows.scheme) == str(direct.rows.scheme)
    assert torch.equal(loaded.table.cache, direct.table.cache)
    assert torch.equal(loaded.table.axis_of_pair, model.model.language_model.vispe_axis_of_pair)
    rates = model.model.language_model.rotary_emb.inv_freq
    angle = torch.arange(99, dtype=torch.float32)[:, None] * rates
    torch.testing.assert_close(
        loaded.table.cache, torch.cat([angle.cos(), angle.sin()], 1), rtol=0, atol=1e-6
    )
    loaded.save(tmp_path / "out")
    described = json.loads((tmp_path / "out" / "positions.json").read_text())
    assert described["rows"] == 99
    assert described["mrope_section"] == list(loaded.table.sections)


@cases("seconds", [None, [0.5]])
def test_seconds_of_a_video_prompt(seconds):
    served = serve_positions(make("qwen2_5_vl"), positions=99, grid_thw=SMALL)
    ids = [3, *[VIDEO] * 12, 4]
    more = {} if seconds is None else {"second_per_grid_ts": seconds}
    actual, delta = served.positions(ids, video_grid_thw=[[2, 4, 6]], **more)
    stream = Stream.of([[Text(1), Video(2, 2, 3, seconds=None if seconds is None else 0.5), Text(1)]])
    expected = served.rows.scheme.coordinates(stream)
    assert actual.tolist() == expected.ids[:, 0].long().tolist()
    assert len(ids) + delta == int(expected.next[0])
