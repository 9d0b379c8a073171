"""Fine-tuning to another scheme: packing, training, going on, loading, on tiny random models."""

import json

import pytest
import torch
from PIL import Image

import vispe
from tests.hosts.transformers.conftest import IGNORED_WARNINGS
from tests.hosts.transformers.processors import llava_processor
from tests.hosts.transformers.tiny import END, IMAGE, START, VIDEO, make
from vispe.errors import InputError, OptionError, UnsupportedHost
from vispe.experimental.vlm.synthetic_tasks import COLOURS, TASKS, Words, draw
from vispe.train.vlm.lora import LoraRecipe, accuracy, finetune_scheme, load_adapter
from vispe.train.vlm.lora_command import LoraTask, fine_tune, main, read_task
from vispe.train.vlm.packing import IGNORED, Packing
from vispe.train.vlm.prompts import OrderedPrompt

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft", reason="peft is not installed")
pytestmark = [pytest.mark.filterwarnings(line) for line in IGNORED_WARNINGS]
WORDS = Words(image=IMAGE, video=VIDEO, start=START, end=END, width=96)
SIZES = {"picture": (3,), "place": (2, 3), "time": (4,)}
# merged 2 x 2: 4 patches behind a token, and 2 frames in one
SCHEMES = ("rope1d", "mrope(after=side)", "mrope_i", "vrope", "v2pe", "videorope", "circlerope")


def merged(sample):
    """The sample as a model that merges 2 x 2 patches takes it."""
    inputs = dict(sample.inputs)
    for name in inputs:
        if name.endswith("grid_thw"):
            inputs[name] = inputs[name] * torch.tensor([1, 2, 2])
        elif name.startswith("pixel"):
            inputs[name] = inputs[name].repeat_interleave(4, 0)
    return OrderedPrompt(inputs, (), sample.answer)


def some(count=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tasks = list(SIZES)
    return [merged(draw(t, SIZES[t], WORDS, generator)) for t in (tasks * count)[:count]]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_packed_samples_have_the_logits_of_separate_ones(scheme):
    model = vispe.convert(make("qwen2_vl"), scheme)
    samples = some()
    packing = Packing(model, 80)
    rows = packing.rows([s.inputs["input_ids"].shape[1] for s in samples])
    assert max(map(len, rows)) > 1
    assert sorted(k for row in rows for k in row) == list(range(len(samples)))
    inputs = packing(samples)
    labels = inputs.pop("labels")
    with torch.no_grad():
        actual = model(**inputs).logits
        for at, row in enumerate(rows):
            end = 0
            for k in row:
                single = model(**samples[k].inputs).logits[0]
                start, end = end, end + len(single)
                torch.testing.assert_close(actual[at, start:end], single, atol=2e-5, rtol=1e-4)
                expected = torch.full((len(single),), IGNORED)
                expected[samples[k].answer] = samples[k].wanted
                assert torch.equal(labels[at, start:end], expected)
            assert (labels[at, end:] == IGNORED).all()


def test_gradients_of_packed_samples_equal_separate_ones():
    model = vispe.convert(make("qwen2_vl"), "vrope")
    samples = some()
    inputs = Packing(model, 80)(samples)
    model(**inputs).loss.backward()
    packed = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    for s in samples:
        logits = model(**s.inputs).logits[0, s.asking]
        (torch.nn.functional.cross_entropy(logits, s.wanted) / len(samples)).backward()
    single = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert packed.keys() == single.keys()
    for name, grad in single.items():
        torch.testing.assert_close(packed[name], grad, atol=2e-5 * float(grad.abs().max()) + 1e-6, rtol=1e-3)


def test_the_stock_scheme_packed_is_the_stock_model():
    stock, samples = make("qwen2_vl"), some(3)
    with torch.no_grad():
        single = [stock(**s.inputs, mm_token_type_ids=types(s)).logits[0, s.asking] for s in samples]
        model = vispe.convert(make("qwen2_vl"), "mrope(after=side)")
        inputs = Packing(model, 400)(samples)
        labels = inputs.pop("labels")
        actual = model(**inputs).logits
    order = Packing(model, 400).rows([s.inputs["input_ids"].shape[1] for s in samples])[0]
    requested = (labels[0, 1:] != IGNORED).nonzero()[:, 0]
    torch.testing.assert_close(
        actual[0, requested], torch.cat([single[k] for k in order]), atol=2e-5, rtol=1e-4
    )


def types(sample):
    ids = sample.inputs["input_ids"]
    return (ids == IMAGE).long() + 2 * (ids == VIDEO).long()


def test_draws_depend_on_the_samples_only():
    model, samples = vispe.convert(make("qwen2_vl"), "v2pe"), some()
    first, second = (Packing(model, 80, training=True, seed=1) for _ in range(2))
    expected = first(samples)["position_ids"]
    torch.manual_seed(123)
    second(samples[:2])
    assert torch.equal(second(samples)["position_ids"], expected)
    other = Packing(model, 80, training=True, seed=2)(samples)["position_ids"]
    assert not torch.equal(other, expected)
    assert torch.equal(Packing(model, 80)(samples)["position_ids"][0], expected[0])


@pytest.mark.parametrize("task", TASKS)
def test_the_answer_depends_on_position_only(task):
    """All answers come up, and the patches of the colour asked for are where the answer says, and nowhere else."""
    generator = torch.Generator().manual_seed(0)
    samples = [draw(task, SIZES[task], WORDS, generator) for _ in range(64)]
    assert {int(s.wanted) for s in samples} == {WORDS.answer(task, k) for k in range(TASKS[task])}
    for s in samples:
        name = "pixel_values_videos" if task == "time" else "pixel_values"
        patches = s.inputs[name].view(-1, 3, 32).mean(2)
        colour = s.inputs["input_ids"][0, -2] - WORDS.first
        at = ((patches - COLOURS[colour]).abs().amax(1) < 0.6).nonzero()[:, 0]
        assert len(patches) == (6 if task == "place" else 4 * SIZES[task][0])
        k = int(s.wanted) - WORDS.answer(task, 0)
        expected = {"place": [[0], [2], [3], [5]][k % 4]}.get(task)
        if expected is None:
            first = 0 if k == 0 else len(patches) - 4
            expected = list(range(first, first + 4))
        assert at.tolist() == expected


def recipe(**changes):
    return LoraRecipe(
        **{"scheme": "v2pe", "steps": 4, "batch_size": 3, "max_length": 80, "rank": 2, "lr": 1e-2} | changes
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    return finetune_scheme(make("qwen2_vl"), some(9), recipe(save_steps=2), out, device="cpu"), out


@pytest.mark.slow
def test_an_adapter_loads_on_a_stock_model_with_its_scheme(trained):
    tuned, out = trained
    fresh = load_adapter(make("qwen2_vl"), out)
    samples = some(5, seed=3)
    inputs = Packing(tuned.get_base_model(), 80)(samples)
    with torch.no_grad():
        expected = tuned(**inputs).logits
        assert torch.equal(fresh(**inputs).logits, expected)
        plain = vispe.convert(make("qwen2_vl"), "v2pe")(**inputs).logits
        assert not torch.allclose(plain, expected, atol=1e-3)
        merged_model = fresh.merge_and_unload()
        actual = merged_model(**inputs).logits
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    weights = {n for n, p in tuned.named_parameters() if p.requires_grad}
    assert weights
    assert all("language_model" in n and "lora_" in n for n in weights)


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one(trained, tmp_path):
    uninterrupted, _ = trained
    finetune_scheme(make("qwen2_vl"), some(9), recipe(save_steps=2, steps=2), tmp_path, device="cpu")
    on = finetune_scheme(make("qwen2_vl"), some(9), recipe(save_steps=2), tmp_path, device="cpu")
    expected = {n: p for n, p in uninterrupted.named_parameters() if p.requires_grad}
    for name, p in on.named_parameters():
        if p.requires_grad:
            assert torch.equal(p, expected[name]), name
    assert (tmp_path / "checkpoint-4").is_dir()
    with pytest.raises(InputError, match=r"another recipe \(rank, scheme\)"):
        finetune_scheme(make("qwen2_vl"), some(9), recipe(rank=3, scheme="vrope"), tmp_path, device="cpu")
    with pytest.raises(InputError, match=r"another recipe \(samples\)"):
        finetune_scheme(make("qwen2_vl"), some(9, seed=8), recipe(), tmp_path, device="cpu")


@pytest.mark.slow
def test_training_teaches(tmp_path):
    generator = torch.Generator().manual_seed(1)
    samples = [merged(draw("time", (2,), WORDS, generator)) for _ in range(16)]
    before = vispe.convert(make("qwen2_vl"), "mrope_i")
    layers = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj")
    taught = recipe(scheme="mrope_i", steps=250, batch_size=16, rank=8, target_modules=layers, lr=3e-3)
    tuned = finetune_scheme(make("qwen2_vl"), samples, taught, tmp_path, device="cpu")
    assert accuracy(before, samples) < 0.6
    assert accuracy(tuned, samples) > 0.9
    assert accuracy(tuned, samples, batch_size=3) == accuracy(tuned, samples)


def test_errors(tmp_path):
    model = make("qwen2_vl")
    with pytest.raises(OptionError, match="without one"):
        Packing(model, 80)
    with pytest.raises(OptionError, match="got none"):
        finetune_scheme(model, [], recipe(), tmp_path)
    with pytest.raises(InputError, match="at most length=9 tokens, got"):
        finetune_scheme(model, some(3), recipe(max_length=9), tmp_path, device="cpu")
    with pytest.raises(UnsupportedHost, match="no linear layers called nope"):
        finetune_scheme(make("qwen2_vl"), some(3), recipe(target_modules=("nope",)), tmp_path, device="cpu")
    with pytest.raises(InputError, match=r"needs scheme\.json and an adapter"):
        load_adapter(make("qwen2_vl"), tmp_path / "none")
    for options in ({"steps": 0}, {"lr": 0.0}, {"seed": -1}):
        with pytest.raises(OptionError, match=next(iter(options))):
            recipe(**options)
    for requested in (("when", (2,)), ("time", (1,)), ("place", (2,))):
        with pytest.raises(OptionError, match="task must be one of picture, place, time"):
            draw(*requested, WORDS, torch.Generator())


def test_the_recipe_says_what_the_defaults_are():
    task = read_task(["--config", "vlm_lora_scheme.yaml"])
    plain = LoraTask(model=task.model, data=task.data, out=task.out, item=task.item)
    assert (*task.target_modules,) == (*plain.target_modules,)
    for key in (
        "scheme",
        "steps",
        "batch_size",
        "max_length",
        "lr",
        "rank",
        "save_steps",
        "val_every",
        "seed",
    ):
        assert getattr(task, key) == getattr(plain, key), key


@pytest.mark.slow
def test_the_recipe_runs_from_prompts_to_an_adapter(tmp_path, capsys):
    lines = []
    for k in range(5):
        Image.new("RGB", (20, 16), (50 * k, 200 - 40 * k, 90)).save(tmp_path / f"{k}.png")
        lines.append(
            {"images": [f"{k}.png"], "before": "w5", "after": f"w6 w{20 + k}", "answer": f"w{k + 7}"}
        )
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    make("llava").save_pretrained(tmp_path / "start")
    llava_processor().save_pretrained(tmp_path / "start")
    paths = {"model": tmp_path / "start", "data": tmp_path / "prompts.jsonl", "out": tmp_path / "out"}
    requested = [
        "--config",
        "vlm_lora_scheme.yaml",
        "--item",
        "w1 {image} w2",
        "--steps",
        "2",
        "--batch_size",
        "2",
    ]
    requested += ["--max-length", "64", "--device", "cpu"]
    requested += [w for k, v in paths.items() for w in (f"--{k}", str(v))]
    assert main(requested) == 0
    assert "accuracy on" in capsys.readouterr().out
    card = json.loads((tmp_path / "out" / "card.json").read_text())
    assert (card["held_out"], card["learnt_from"], card["task"]["scheme"]) == (1, 4, "mrope_i")
    start = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "start")
    assert "lora" in str(load_adapter(start, tmp_path / "out")).lower()
    assert main(requested) == 2
    assert "contains a finished run" in capsys.readouterr().err
    with pytest.raises(InputError, match="data must be a file with one prompt per line"):
        fine_tune(LoraTask(model="m", data="none.jsonl", out=str(tmp_path / "new")))
    with pytest.raises(InputError, match="has no processor that transformers can load"):
        fine_tune(LoraTask(model=str(tmp_path / "none"), data=str(paths["data"]), out=str(tmp_path / "new")))
