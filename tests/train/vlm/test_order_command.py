"""The recipe for order invariance runs from a file of prompts to a model, with a tiny random one."""

import json

import pytest
import torch
from PIL import Image

from tests.hosts.transformers.conftest import IGNORED_WARNINGS
from tests.hosts.transformers.processors import llava_processor
from tests.hosts.transformers.tiny import IMAGE, SIDE, make
from vispe.errors import InputError, OptionError
from vispe.train.vlm.order_command import OrderTask, main, order_invariance, read_prompts, read_task

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.filterwarnings(line) for line in IGNORED_WARNINGS]
ITEM = "w1 {image} w2"


@pytest.fixture
def processor():
    return llava_processor()


def write(folder, count=5, **changes):
    """Write prompts of three images; return the file."""
    for k in range(4):
        Image.new("RGB", (20, 16), (60 * k, 200 - 40 * k, 90)).save(folder / f"{k}.png")
    lines = []
    for k in range(count):
        images = [f"{(k + j) % 4}.png" for j in range(3)]
        lines.append(
            {"images": images, "before": "w5", "after": f"w6 w{20 + k}", "answer": f"w{k + 7}", **changes}
        )
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "prompts.jsonl"


def test_prompts_are_read_as_the_processor_writes_them(processor, tmp_path):
    prompts = read_prompts(processor, write(tmp_path), ITEM)
    assert len(prompts) == 5
    arranged = prompts[0].arranged([0, 1, 2])
    item = [1, *[IMAGE] * SIDE**2, 2]
    assert arranged.inputs["input_ids"].tolist() == [[5, *item * 3, 6, 20, 7, 250]]
    assert arranged.wanted.tolist() == [7, 250]
    assert arranged.inputs["pixel_values"].shape == (3, 3, 12, 12)
    words = "w5 " + f"{ITEM.replace('{image}', '<image>')} " * 3 + "w6 w20 w7 <eos>"
    images = [Image.open(tmp_path / f"{k}.png") for k in range(3)]
    encoded = processor(text=[words], images=images, return_tensors="pt")
    assert torch.equal(encoded["input_ids"], arranged.inputs["input_ids"])
    torch.testing.assert_close(encoded["pixel_values"], arranged.inputs["pixel_values"])


def test_the_recipe_runs_from_prompts_to_a_model(processor, tmp_path, capsys):
    data, start = write(tmp_path), tmp_path / "start"
    make("llava").save_pretrained(start)
    processor.save_pretrained(start)
    requested = ["--config", "vlm_order_invariance.yaml", "--data", str(data), "--out", str(tmp_path / "out")]
    requested += [
        "--model",
        str(start),
        "--item",
        ITEM,
        "--steps",
        "3",
        "--batch_size",
        "2",
        "--orders",
        "3",
        "--device",
        "cpu",
    ]
    assert main(requested) == 0
    captured = capsys.readouterr()
    assert "before: spread over orders" in captured.out
    card = json.loads((tmp_path / "out" / "card.json").read_text())
    assert (card["held_out"], card["learnt_from"], card["task"]["even"]) == (1, 4, 0.1)
    assert card["before"]["spread"] > 0
    assert card["before"] != card["after"]
    names = [
        transformers.AutoModelForImageTextToText.from_pretrained(p).state_dict()
        for p in (start, tmp_path / "out")
    ]
    changed = {n for n, v in names[0].items() if not torch.equal(v, names[1][n])}
    assert changed == {
        n for n in names[0] if "language" in n and n.endswith(("q_proj.weight", "k_proj.weight"))
    }
    assert main(requested) == 2
    assert "contains a finished run" in capsys.readouterr().err


def test_the_recipe_says_what_the_defaults_are():
    task = read_task(["--config", "vlm_order_invariance.yaml"])
    plain = OrderTask(model=task.model, data=task.data, out=task.out, item=task.item)
    assert (*task.target_modules,) == (*plain.target_modules,)
    for key in ("steps", "batch_size", "lr", "rank", "even", "val_every", "orders", "seed"):
        assert getattr(task, key) == getattr(plain, key), key


def test_invalid_prompts_raise(processor, tmp_path):
    with pytest.raises(InputError, match=r"prompts\.jsonl: line 1: keys must be images, .* got colour"):
        read_prompts(processor, write(tmp_path, colour=1), ITEM)
    with pytest.raises(InputError, match=r"line 1 is not a valid prompt \(FileNotFoundError"):
        read_prompts(processor, write(tmp_path, images=["no.png"]), ITEM)
    (tmp_path / "prompts.jsonl").write_text("[1\n")
    with pytest.raises(InputError, match="line 1 is not a valid prompt"):
        read_prompts(processor, tmp_path / "prompts.jsonl", ITEM)
    make("llava").save_pretrained(tmp_path / "start")
    processor.save_pretrained(tmp_path / "start")
    paths = {"model": str(tmp_path / "start"), "data": str(write(tmp_path, 3)), "out": str(tmp_path / "out")}
    with pytest.raises(InputError, match="needs at least val_every=5 prompts, got 3"):
        order_invariance(OrderTask(**paths, item=ITEM))
    with pytest.raises(InputError, match="data must be a file with one prompt per line"):
        order_invariance(OrderTask(**paths | {"data": "none.jsonl"}, item=ITEM))
    with pytest.raises(InputError, match="has no processor that transformers can load"):
        order_invariance(OrderTask(**paths | {"model": str(tmp_path / "none")}, item=ITEM))
    for options in ({"item": "w1"}, {"orders": 1}, {"val_every": 1}):
        with pytest.raises(OptionError, match=next(iter(options))):
            OrderTask(**paths, **options)
