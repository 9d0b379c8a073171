"""The order of images in a prompt: shuffled in training, it decides less; tiny random models of transformers."""

import itertools
from dataclasses import replace

import pytest
import torch

from tests.hosts.transformers.conftest import IGNORED_WARNINGS
from tests.hosts.transformers.tiny import IMAGE, PATCH, SIDE, make
from tests.products import slow_except
from tests.train.processes import two_processes
from vispe.backbones.distributed import Processes
from vispe.errors import InputError, OptionError, UnsupportedHost
from vispe.train.retrofit.lora import add_lora
from vispe.train.vlm import order_invariance
from vispe.train.vlm.order_invariance import (
    OrderRecipe,
    attention_inequality,
    order_scores,
    train_order_invariance,
)
from vispe.train.vlm.prompts import OrderedPrompt, Piece, Prompt

pytestmark = [pytest.mark.filterwarnings(line) for line in IGNORED_WARNINGS]
ORDERS = list(itertools.permutations(range(3)))


def prompts(family, count, seed=0):
    """Three images and a word after each; the answer is a word that the first item has, wherever it stands."""
    generator = torch.Generator().manual_seed(seed)
    side, actual = SIDE * PATCH, []
    for _ in range(count):
        words = (torch.randperm(200, generator=generator)[:4] + 1).tolist()
        items = []
        for word in words[:3]:
            tokens, inputs, kinds = torch.tensor([IMAGE] * SIDE**2 + [word]), {}, {}
            inputs["pixel_values"] = torch.randn(1, 3, side, side, generator=generator)
            if family == "qwen2_vl":
                tokens = torch.tensor([IMAGE] * 4 + [word])
                inputs["pixel_values"] = torch.randn(16, 96, generator=generator)
                inputs["image_grid_thw"] = torch.tensor([[1, 4, 4]])
                kinds = {"mm_token_type_ids": (tokens == IMAGE).long()}
            items.append(Piece(tokens, inputs, kinds))
        before, after = Piece(torch.tensor([210, 211])), Piece(torch.tensor([212, words[3]]))
        actual.append(Prompt(items, Piece(torch.tensor([words[0], 213])), before, after))
    return actual


def score_range(model, requested):
    scores = torch.stack([order_scores(model, prompt, ORDERS) for prompt in requested])
    return float((scores.amax(1) - scores.amin(1)).mean())


@pytest.mark.slow
@pytest.mark.parametrize("family", slow_except(["llava", "qwen2_vl"], ["llava"]))
def test_the_order_decides_less_after_training(family):
    """On the training prompts: random models share nothing that would carry over to other prompts."""
    model = make(family)
    model.set_attn_implementation("eager")
    requested = prompts(family, 6)
    before, weights = score_range(model, requested), {n: v.clone() for n, v in model.state_dict().items()}
    losses = []
    recipe = OrderRecipe(steps=40, batch_size=4, lr=1e-2, rank=4)
    train_order_invariance(model, requested, recipe, lambda step, loss: losses.append(loss))
    assert score_range(model, requested) < 0.8 * before
    assert sum(losses[-5:]) < sum(losses[:5])
    changed = {n for n, v in model.state_dict().items() if not torch.equal(v, weights[n])}
    assert changed == {
        n for n in weights if "language" in n and n.endswith(("q_proj.weight", "k_proj.weight"))
    }


class Stopped(Exception):
    pass


@pytest.fixture
def save_every_second_update(monkeypatch):
    """Save after every second update."""
    monkeypatch.setattr(order_invariance, "_SAVED_EVERY", 2)


RECIPE = OrderRecipe(steps=5, batch_size=3, lr=1e-2, rank=2, even=0.0, seed=4)


def learnt(family="llava", recipe=RECIPE, **options):
    model = make(family)
    train_order_invariance(model, prompts(family, 4), recipe, **options)
    return model.state_dict()


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, save_every_second_update):
    file, steps = tmp_path / "out" / "state.pt", []

    def stop(step, loss):
        steps.append(step)
        if step == 3:
            raise Stopped

    with pytest.raises(Stopped):
        learnt(state=file, on_step=stop)
    resumed = learnt(state=file, on_step=lambda step, _: steps.append(step))
    assert steps == [1, 2, 3, 3, 4, 5]  # from the state after the second update
    uninterrupted = learnt()
    assert all(torch.equal(uninterrupted[name], resumed[name]) for name in uninterrupted)
    with pytest.raises(InputError, match=r"state.pt belongs to another recipe or other prompts. Remove it"):
        learnt(state=file, recipe=replace(RECIPE, lr=1e-3))
    # other pixels with the same tokens
    other = prompts("llava", 4)
    other[2].items[1].inputs["pixel_values"][0, 0, 0, 0] += 1
    with pytest.raises(InputError, match="belongs to another recipe or other prompts"):
        train_order_invariance(make("llava"), other, RECIPE, state=file)


def test_processes_share_a_batch(monkeypatch):
    """Run in sequence, the gradients of the processes add up to those of one process."""
    sums = []
    monkeypatch.setattr(Processes, "sum_", lambda self, grads: sums.append([g.clone() for g in grads]))
    one = replace(RECIPE, steps=1)
    for processes in (Processes(), Processes(0, 2), Processes(1, 2)):
        learnt(recipe=one, processes=processes)
    full, first, second = (part for part in sums if len(part) > 1)
    for a, b, c in zip(full, first, second, strict=True):
        torch.testing.assert_close(a, b + c)
    assert all(sum(float(g.abs().sum()) for g in part) > 0 for part in (first, second))


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
    two_processes("orders", tmp_path / "two.pt")
    one, two = learnt(), torch.load(tmp_path / "two.pt")
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-4, atol=1e-5)


def test_the_same_seed_learns_the_same_and_leaves_random_numbers_alone():
    actual = []
    for _ in range(2):
        model, before = make("llava"), torch.get_rng_state()
        train_order_invariance(model, prompts("llava", 3), OrderRecipe(steps=2, batch_size=2, even=0.0))
        assert torch.equal(torch.get_rng_state(), before)
        actual.append(model.state_dict())
    assert all(torch.equal(actual[0][name], actual[1][name]) for name in actual[0])


@pytest.mark.slow
def test_the_penalty_evens_attention():
    requested, actual = prompts("llava", 4), []
    for even in (0.0, 20.0):
        model = make("llava")
        model.set_attn_implementation("eager")
        train_order_invariance(
            model, requested, OrderRecipe(steps=15, batch_size=2, lr=1e-2, rank=2, even=even)
        )
        values = []
        with torch.no_grad():
            for prompt, order in itertools.product(requested[:2], ORDERS[::2]):
                arranged = prompt.arranged(order)
                output = model(**arranged.inputs, output_attentions=True)
                values.append(float(attention_inequality(output.attentions, arranged)))
        actual.append(sum(values) / len(values))
    assert actual[1] < 0.5 * actual[0]


def test_unevenness_is_the_variance_of_shares():
    attention = torch.rand(2, 1, 3, 9, 9, generator=torch.Generator().manual_seed(0)).requires_grad_()
    arranged = OrderedPrompt({}, (slice(1, 3), slice(3, 6)), slice(7, 9))
    rows = attention[:, 0, :, 6:8].mean((0, 1, 2))
    items = torch.stack([rows[1:3].mean(), rows[3:6].mean()])
    expected = items.var(unbiased=False) / items.mean() ** 2
    actual = attention_inequality(list(attention), arranged)
    torch.testing.assert_close(actual, expected)
    grads = [torch.autograd.grad(x, attention, retain_graph=True)[0] for x in (actual, expected)]
    torch.testing.assert_close(*grads)
    assert float(attention_inequality([torch.full((1, 2, 9, 9), 1 / 9)], arranged)) < 1e-12


def test_pieces_stand_where_the_order_says():
    prompt = prompts("qwen2_vl", 1)[0]
    plain, rotated = prompt.arranged([0, 1, 2]), prompt.arranged([2, 0, 1])
    for slot, item in enumerate([2, 0, 1]):
        tokens = rotated.inputs["input_ids"][0, rotated.items[slot]]
        assert torch.equal(tokens, prompt.items[item].tokens)
        assert torch.equal(
            rotated.inputs["pixel_values"][16 * slot : 16 * slot + 16],
            prompt.items[item].inputs["pixel_values"],
        )
    assert torch.equal(plain.wanted, prompt.answer.tokens)
    kinds = plain.inputs["mm_token_type_ids"]
    assert torch.equal(kinds, (plain.inputs["input_ids"] == IMAGE).long())
    assert plain.inputs["image_grid_thw"].shape == (3, 3)


def test_errors():
    prompt = prompts("llava", 1)[0]
    with pytest.raises(OptionError, match=r"order must be a permutation of 3 items, got \[0, 0, 1\]"):
        prompt.arranged([0, 0, 1])
    with pytest.raises(OptionError, match="got 0 items and an answer of 2 tokens"):
        Prompt([], prompt.answer)
    with pytest.raises(OptionError, match="got a prompt with one"):
        train_order_invariance(make("llava"), [Prompt(prompt.items[:1], prompt.answer)], OrderRecipe())
    with pytest.raises(OptionError, match="steps needs an integer above 0, got steps=0"):
        OrderRecipe(steps=0)
    with pytest.raises(OptionError, match="needs prompts, got none"):
        train_order_invariance(make("llava"), [], OrderRecipe())
    with pytest.raises(
        UnsupportedHost, match=r"even=0\.1 needs the attention weights .*set_attn_implementation"
    ):
        train_order_invariance(make("llava"), [prompt], OrderRecipe(steps=1, batch_size=1))
    with pytest.raises(UnsupportedHost, match="no linear layers called qkv, which LoRA needs"):
        add_lora(make("llava"), 2, ("q_proj", "qkv"))
