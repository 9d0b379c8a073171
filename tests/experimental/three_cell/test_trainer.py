"""Training on three cells: accuracy, bit-exact repetition and resumption, and the table of runs."""

import json
import math

import pytest
import torch

import vispe
from vispe.errors import InputError, OptionError, UnknownEncoding
from vispe.experimental.three_cell import dataset
from vispe.experimental.three_cell.model import ThreeCellRecipe, ThreeCellViT
from vispe.experimental.three_cell.results import read_rows, run_missing
from vispe.experimental.three_cell.summary import ThreeCellTable, plot_table, summary
from vispe.experimental.three_cell.trainer import _training_cells, logits, train

pytestmark = pytest.mark.slow

TINY = ThreeCellRecipe(grid=5, dim=32, depth=1, num_heads=2, hidden=16, steps=12, batch_size=8, test=60)


class Killed(Exception):
    pass


def kill_at(last):
    def on_step(step, _):
        if step == last:
            raise Killed

    return on_step


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_a_good_encoding_learns_and_none_does_not():
    recipe = ThreeCellRecipe(grid=5, dim=32, depth=1, num_heads=2, hidden=64, steps=200, test=400, lr=4e-3)
    losses = []
    model, run = train("sincos2d", 1, recipe, on_step=lambda _, loss: losses.append(loss))
    assert sum(losses[-20:]) / 20 < 0.75 * sum(losses[:20]) / 20
    assert run.scores.average > run.majority.average + 12
    assert run.cpu_s > 0
    cells = dataset.sample_cells(400, 5, torch.Generator().manual_seed(2025))
    assert dataset.score(logits(model, cells, 5), dataset.labels(cells, 5)) == run.scores


def test_without_position_all_images_have_equal_logits():
    torch.manual_seed(0)
    model = ThreeCellViT("none", TINY).eval()
    cells = dataset.sample_cells(40, 5, torch.Generator().manual_seed(0))
    actual = logits(model, cells, 5, batch_size=7)
    assert actual.shape == (40, 6)
    torch.testing.assert_close(actual, actual[:1].expand(40, -1), rtol=1e-4, atol=1e-5)
    outputs = logits(ThreeCellViT("sincos2d", TINY).eval(), cells, 5)
    assert float(outputs.std(0).min()) > 1e-3


SAMPLERS = vispe.list_encodings(kind="positions")


@pytest.mark.parametrize(
    "spec", [*vispe.list_encodings(ndim=2, exclude=SAMPLERS), "rfs(reach=28)+rope_axial"]
)
def test_every_two_axis_encoding_fits_the_model(spec):
    model = ThreeCellViT(spec, ThreeCellRecipe(depth=2))
    cells = dataset.sample_cells(2, generator=torch.Generator().manual_seed(0))
    out = model(dataset.images(cells, patch_size=1))
    assert out.shape == (2, 6)
    out.square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_the_same_seed_gives_the_same_model_and_another_does_not():
    (one, first), (two, second) = (train("learned", 3, TINY) for _ in range(2))
    assert torch.equal(weights(one), weights(two))
    assert first.to_dict() | {"cpu_s": 0} == second.to_dict() | {"cpu_s": 0}
    assert not torch.equal(weights(train("learned", 4, TINY)[0]), weights(one))
    assert first.recipe == TINY
    assert first.to_dict()["recipe"]["grid"] == 5


def test_the_global_generator_is_unchanged():
    torch.manual_seed(7)
    state = torch.get_rng_state()
    train("learned", 0, TINY)
    assert torch.equal(torch.get_rng_state(), state)


# drawn in each step
@pytest.mark.parametrize("spec", ["learned", "alibi2d(jitter=0.1)", "rfs(reach=9)+alibi2d"])
@pytest.mark.parametrize("last", [2, 9])
def test_a_killed_training_resumes_bit_by_bit(tmp_path, spec, last):
    file = tmp_path / "state.pt"
    uninterrupted, run = train(spec, 0, TINY)
    with pytest.raises(Killed):
        train(spec, 0, TINY, checkpoint=file, every=5, on_step=kill_at(last))
    assert file.exists() is (last == 9)
    steps = []
    model, resumed_run = train(spec, 0, TINY, checkpoint=file, every=5, on_step=lambda s, _: steps.append(s))
    assert steps == list(range(10 * (last == 9), 12))
    assert torch.equal(weights(model), weights(uninterrupted))
    assert resumed_run.scores == run.scores
    finished_model, third = train(
        spec, 0, TINY, checkpoint=file, on_step=kill_at(11)
    )  # nothing is left to do
    assert torch.equal(weights(finished_model), weights(uninterrupted))
    assert third.scores == run.scores
    assert [p.name for p in tmp_path.iterdir()] == ["state.pt"]


def test_a_checkpoint_of_another_run_raises(tmp_path):
    file = tmp_path / "state.pt"
    train("learned", 0, TINY, checkpoint=file)
    with pytest.raises(InputError, match="written with seed 0, got 1"):
        train("learned", 1, TINY, checkpoint=file)
    with pytest.raises(InputError, match="written with encoding learned, got none"):
        train("none", 0, TINY, checkpoint=file)
    file.write_bytes(b"nothing")
    with pytest.raises(InputError, match="is not a checkpoint of the three-cell training; remove it"):
        train("learned", 0, TINY, checkpoint=file)
    with pytest.raises(OptionError, match="needs an integer above 0"):
        train("learned", 0, ThreeCellRecipe(steps=0))


def test_test_images_are_not_trained_on():
    recipe = ThreeCellRecipe(grid=4, steps=40, batch_size=20)
    test = dataset.sample_cells(300, 4, torch.Generator().manual_seed(1))
    cells = _training_cells(recipe, 0, test)
    assert cells.shape == (800, 3, 2)
    trained = {tuple(c.flatten().tolist()) for c in cells}
    assert not trained & {tuple(c.flatten().tolist()) for c in test}
    assert len(trained) > 300


def test_a_table_grows_run_by_run_without_repetitions(tmp_path):
    file = tmp_path / "table.json"
    requested = []
    rows = run_missing(
        ["none", "learned"], [0, 1], TINY, file=file, on_step=lambda *a: requested.append(a[:2])
    )
    first = next(rows)
    assert read_rows(file, TINY) == [first]
    rows.close()
    requested.clear()
    new_rows = list(
        run_missing(["none", "learned"], [0, 1], TINY, file=file, on_step=lambda *a: requested.append(a[:2]))
    )
    assert [(r["encoding"], r["seed"]) for r in new_rows] == [("learned", 0), ("none", 1), ("learned", 1)]
    assert ("none", 0) not in requested
    assert list(run_missing(["none"], [1, 0], TINY, file=file)) == []
    assert [p.name for p in tmp_path.iterdir()] == ["table.json"]
    stored = json.loads(file.read_text())
    assert [(r["encoding"], r["seed"]) for r in stored["rows"]] == [
        ("learned", 0), ("learned", 1), ("none", 0), ("none", 1),
    ]  # fmt: skip
    assert stored["recipe"]["grid"] == 5
    with pytest.raises(InputError, match=r"another recipe \(steps 12\)"):
        next(run_missing(["none"], [0], ThreeCellRecipe(**{**vars(TINY), "steps": 13}), file=file))


def test_a_stopped_run_of_a_table_resumes(tmp_path):
    file = tmp_path / "table.json"
    long = ThreeCellRecipe(**{**vars(TINY), "steps": 103, "batch_size": 2})

    def kill(_, __, step, ___):
        if step == 101:
            raise Killed

    with pytest.raises(Killed):
        list(run_missing(["rope_axial(temperature=10)"], [0], long, file=file, on_step=kill))
    steps = []
    (row,) = run_missing(
        ["rope_axial(temperature=10)"], [0], long, file=file, on_step=lambda _, __, s, ___: steps.append(s)
    )
    assert steps == list(range(100, 103))
    (fresh,) = run_missing(["rope_axial(temperature=10)"], [0], long)
    assert row["scores"] == fresh["scores"]


def test_bad_tables_raise(tmp_path):
    with pytest.raises(OptionError, match="encodings and seeds must be distinct"):
        next(run_missing(["none", "none"], [0], TINY))
    with pytest.raises(UnknownEncoding, match="Did you mean 'learned'"):
        next(run_missing(["learnt"], [0], TINY))
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(InputError, match="not a file of three-cell scores"):
        read_rows(tmp_path / "x.json")
    with pytest.raises(OptionError, match="no three-cell scores to draw"):
        plot_table([])


def row(encoding, seed, average):
    names = (
        "distance",
        "orientation",
        "area",
        "vector_sum",
        "average",
        "distance_exact",
        "area_exact",
        "balanced",
    )
    scores = dict.fromkeys(names, average)
    return {
        "encoding": encoding,
        "seed": seed,
        "scores": scores,
        "majority": dict.fromkeys(names, 58.0),
        "cpu_s": 9.0,
    }


def test_summary_table_and_figure():
    rows = [
        row("none", 0, 57.0),
        row("none", 1, 59.0),
        row("rope_axial+alibi2d", 0, 90.0),
        row("learned", 0, 80.0),
    ]
    actual = summary(rows)
    assert [r["encoding"] for r in actual] == ["rope_axial+alibi2d", "learned", "none"]
    assert actual[2]["mean"]["area"] == 58.0
    assert actual[2]["std"]["area"] == pytest.approx(math.sqrt(2))
    lines = ThreeCellTable(rows).to_markdown().splitlines()
    assert len(lines) == 6
    assert len({len(line) for line in lines}) == 1
    assert "58.0 ± 1.4" in lines[4]
    assert lines[5].startswith("| (best constant answer) |")
    figure = plot_table(rows)
    assert [ax.get_title(loc="left") for ax in figure.axes] == [
        "average", "distance", "orientation", "area", "vector sum",
    ]  # fmt: skip
    assert [t.get_text() for t in figure.axes[0].texts] == ["90", "80", "58"]
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == [
        "rope_axial+alibi2d",
        "learned",
        "none",
    ]
