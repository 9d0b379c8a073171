"""Samplers: increasing maps of each axis, replayable, shared by the members of a sum, errors without a reader."""

import copy
import math

import pytest
import timm
import torch

import vispe
from tests.cases import cases
from vispe import Grid, Positions, create_encoding
from vispe.encodings.metadata import list_encodings
from vispe.encodings.parts.preparation import prepare
from vispe.encodings.positions import set_progress
from vispe.errors import OptionError, ShapeError, UnsupportedCombination

SAMPLERS = (
    "randomized(reach=40)",
    "randomized(reach=40,spacing=kept,grid=[4,6])",
    "rfs(reach=28)",
    "rfs(reach=28.5,min_gap=0.5)",
    "increments",
    "shift(reach=40)",
    "shift(reach=40,curriculum=[2,20])",
    "gaps(rate=0.5,size=3)",
    "segments(canvas=40,count=3)",
    "jitter(sd=0.4)",
    "stretch(low=0.5,high=2.0)",
)
every = cases("spec", SAMPLERS)


def lines(pos, shape, prefix=0):
    """Return the coordinates of the cells of each axis."""
    grid = pos.coords[0, prefix:].reshape(*shape, len(shape)).double()
    return [grid.select(a, 0) if len(shape) == 1 else None for a in ()] or [
        grid[tuple(slice(None) if i == a else 0 for i in range(len(shape)))][..., a]
        for a in range(len(shape))
    ]


def test_every_sampler_is_tested():
    assert {spec.partition("(")[0] for spec in SAMPLERS} == set(list_encodings(kind="positions"))


@every
@cases("shape", [(1,), (7,), (3, 5), (11, 4), (2, 3, 4), (1, 1)])
def test_maps_of_each_axis_increase_and_are_separable(spec, shape):
    for training in (True, False):
        sampler = create_encoding(spec).train(training)
        grid = Grid(shape, prefix=2)
        pos = sampler.prepare(grid.positions())
        assert torch.equal(pos.coords[:, :2], torch.zeros(1, 2, len(shape)))
        assert torch.equal(pos.spatial, grid.positions().spatial)
        along = lines(pos, shape, 2)
        expected = torch.stack(torch.meshgrid(*along, indexing="ij"), -1).flatten(0, -2)
        torch.testing.assert_close(pos.coords[0, 2:].double(), expected, rtol=0, atol=0)
        for line, length in zip(along, pos.extent[0].tolist(), strict=True):
            assert bool((line.diff() > 0).all())
            assert line[0] > -0.5
            assert line[-1] <= length


@cases("spec", ["shifted_gaussian", "fourier", "fourier(normalize=common)", "spder", "legendre", "neuda"])
def test_fractions_of_the_field_are_those_of_cell_centres(spec):
    """A very small jitter hardly changes fractions, also those at cell centres in evaluation."""
    encoding, pos = create_encoding(spec, dim=16, grid=(4, 6)), Grid((4, 6), prefix=1).positions()
    jittered = create_encoding("jitter(sd=0.0001)").prepare(pos)
    assert not torch.equal(jittered.coords, pos.coords)
    torch.testing.assert_close(encoding.place(jittered)[:, 1:], encoding.place(pos)[:, 1:], rtol=0, atol=1e-3)
    wide = create_encoding("randomized(reach=40)").prepare(pos)
    assert encoding.table(wide).isfinite().all()


@every
def test_lengths_are_in_physical_units(spec):
    sampler = create_encoding(spec)
    draws = sampler.prepare(Grid((3, 5)).positions()).attrs["sampled"]
    near = sampler.prepare(Grid((3, 5)).positions(), draws=draws)
    far = sampler.prepare(Grid((3, 5), spacing=(2.0, 0.5)).positions(), draws=draws)
    scale = torch.tensor([2.0, 0.5])
    torch.testing.assert_close(far.coords, near.coords * scale)
    torch.testing.assert_close(far.extent, near.extent * scale)
    torch.testing.assert_close(far.cell, near.cell * scale)


@every
def test_draws_are_replayed_to_the_bit_and_seeded(spec):
    sampler = create_encoding(spec)
    grid = Grid((6, 9), prefix=1)
    first = sampler.prepare(grid.positions())
    replayed = sampler.prepare(grid.positions(), draws=first.attrs["sampled"])
    assert torch.equal(first.coords, replayed.coords)
    assert torch.equal(first.extent, replayed.extent)
    assert sampler.prepare(first) is first  # prepared already
    assert not torch.equal(first.coords, sampler.prepare(grid.positions()).coords)
    by = [sampler.prepare(grid.positions(), torch.Generator().manual_seed(seed)).coords for seed in (1, 1, 2)]
    assert torch.equal(by[0], by[1])
    assert not torch.equal(by[0], by[2])
    set_progress(sampler, 1.0, seed=1)
    state = torch.get_rng_state()
    assert torch.equal(sampler.prepare(grid.positions()).coords, by[0])
    assert torch.equal(torch.get_rng_state(), state)  # a seeded draw leaves the global generator alone
    assert torch.equal(copy.deepcopy(sampler).prepare(grid.positions()).coords, by[0])


@every
def test_evaluation_is_the_same_in_every_pass(spec):
    sampler = create_encoding(spec).eval()
    pos = Grid((6, 9), prefix=1).positions()
    assert sampler.prepare(pos) is sampler.prepare(pos)
    assert torch.equal(
        sampler.prepare(pos).coords, sampler.prepare(Grid((6, 9), prefix=1).positions()).coords
    )


@every
def test_draws_per_sample(spec):
    name, _, options = spec.partition("(")
    sampler = create_encoding(f"{name}(per=sample,{options}" if options else f"{name}(per=sample)")
    pos = prepare([sampler], Grid((6, 9)).positions(), batch=3)
    assert pos.coords.shape == (3, 54, 2)
    assert not torch.equal(pos.coords[0], pos.coords[1])
    assert pos.extent.shape[0] in (1, 3)
    replayed = prepare([sampler], Grid((6, 9)).positions(), batch=3, draws=pos.attrs["sampled"])
    assert torch.equal(pos.coords, replayed.coords)
    assert prepare([sampler.eval()], Grid((6, 9)).positions(), batch=3).coords.shape[0] == 1


def test_draws_in_evaluation_are_per_sample_too():
    sampler = create_encoding("randomized(reach=40,test=draw,per=sample)").eval()
    pos = prepare([sampler], Grid((6, 9)).positions(), batch=3)
    assert pos.coords.shape == (3, 54, 2)
    assert not torch.equal(pos.coords[0], pos.coords[1])


@every
def test_samples_with_several_fields_of_view_raise(spec):
    sampler = create_encoding(spec)
    coords = torch.stack([Grid((4, 4)).positions().coords[0], Grid((2, 8)).positions().coords[0]])
    pos = Positions(coords, extent=torch.tensor([[4.0, 4.0], [2.0, 8.0]]))
    message = r"needs samples of equal sizes, got 4 x 4, 2 x 8 cells"
    with pytest.raises(ShapeError, match=message):
        sampler.prepare(pos)
    sampler.eval()
    if sampler.prepare(Grid((4, 4)).positions()).grid is None:
        with pytest.raises(ShapeError, match=message):
            sampler.prepare(pos)
    else:  # unchanged in evaluation
        assert sampler.prepare(pos) is pos
    equal = Positions(coords[:1].expand(2, -1, -1), extent=torch.tensor([[4.0, 4.0], [4.0, 4.0]]))
    assert sampler.prepare(equal).coords.shape == (2, 16, 2)


@every
def test_infinite_coordinates_raise(spec):
    pos = Positions(torch.tensor([[0.0, 0.0], [math.nan, 1.0]]), extent=torch.tensor([[2.0, 2.0]]))
    with pytest.raises(ShapeError, match=r"needs finite coordinates, got nan"):
        create_encoding(spec).prepare(pos)


@every
def test_gathering_and_sampling_commute(spec):
    sampler = create_encoding(spec)
    grid = Grid((4, 5), prefix=1)
    keep = torch.tensor([[0, 3, 9, 20], [0, 1, 2, 12]])
    full = sampler.prepare(grid.positions())
    gathered = sampler.prepare(grid.positions().gather(keep), draws=full.attrs["sampled"])
    assert torch.equal(full.gather(keep).coords, gathered.coords)


@every
def test_free_coordinates_are_interpolated(spec):
    sampler = create_encoding(spec)
    draws = sampler.prepare(Grid((4, 5)).positions()).attrs["sampled"]
    on = sampler.prepare(Grid((4, 5)).positions(), draws=draws)
    free = Grid((4, 5)).positions()
    same = Positions(free.coords, free.spatial, free.extent, cell=free.cell)
    torch.testing.assert_close(sampler.prepare(same, draws=draws).coords, on.coords)
    between = Positions(free.coords + 0.5, free.spatial, free.extent, cell=free.cell)
    sampled = sampler.prepare(between, draws=draws).coords.reshape(4, 5, 2)
    grid = on.coords.reshape(4, 5, 2)
    torch.testing.assert_close(sampled[:-1, 0, 0], (grid[:-1, 0, 0] + grid[1:, 0, 0]) / 2)
    torch.testing.assert_close(sampled[-1, 0, 0], grid[-1, 0, 0] + 0.5)  # slope 1 outside


@every
def test_spacing_of_an_encoding_scales_sampled_coordinates(spec):
    pos = create_encoding(spec).prepare(Grid((3, 5), spacing=(2.0, 1.0)).positions())
    far = pos.with_spacing((4.0, 3.0))
    torch.testing.assert_close(far.coords, pos.coords * torch.tensor([2.0, 3.0]))
    torch.testing.assert_close(far.extent, pos.extent * torch.tensor([2.0, 3.0]))
    torch.testing.assert_close(far.with_spacing((2.0, 1.0)).coords, pos.coords)


def test_descriptions_of_samplers_in_sums():
    with pytest.warns(
        UserWarning, match="shift has no effect between patches: rope_axial depends on distances only"
    ):
        model = timm.create_model("vit_tiny_patch16_224", **SMALL, pos_embed="shift+rope_axial")
    assert "shift has no effect between patches" in vispe.describe(model)
    near = timm.create_model("vit_tiny_patch16_224", **SMALL, pos_embed="rfs(reach=4)+rope_axial")
    assert "half a turn" not in vispe.describe(near)
    far = timm.create_model("vit_tiny_patch16_224", **SMALL, pos_embed="rfs(reach=64)+rope_axial")
    # 4 cells have distances of 16: of the 4 frequencies of an axis, 100^(-k/4), those above pi/16 are 1 and 0.316
    assert "rfs rotates 50% of the channel pairs of rope_axial by more than half a turn" in vispe.describe(
        far
    )


def test_distances_are_invariant_to_shift():
    torch.manual_seed(0)
    q = torch.randn(1, 2, 13, 16)
    for name in ("rope_axial", "alibi2d(wrap=false,normalize=none)", "rope_mixed"):
        both = create_encoding(f"shift(reach=40)+{name}", dim=32, num_heads=2, grid=(3, 4))
        pos = both.prepare(Grid((3, 4), prefix=1).positions())
        grid_pos = Grid((3, 4), prefix=1).positions()
        for one in both.parts()[1:]:
            outs = [vispe.encodings.attention_layer.attend(q, q, q, (one,), p, 0) for p in (pos, grid_pos)]
            a, b = (o[:, :, 1:] for o in outs)
            if name == "alibi2d(wrap=false,normalize=none)":
                torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
            else:  # prefix tokens stand at 0, so only scores between patches agree
                rotated = [one.transform(p, 0) for p in (pos, grid_pos)]
                a, b = (t.query(q)[:, :, 1:] @ t.key(q)[:, :, 1:].mT for t in rotated)
                torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


def test_a_reach_of_all_cells_is_the_identity():
    sampler = create_encoding("randomized(reach=9)")
    for training in (True, False):
        pos = sampler.train(training).prepare(Grid((9, 9)).positions())
        assert torch.equal(pos.coords, Grid((9, 9)).positions().coords)


def test_gaps_of_rfs_are_nearly_exponential_with_the_documented_mean():
    generator = torch.Generator().manual_seed(0)
    sampler = create_encoding("rfs(reach=10)")
    gaps = torch.cat([sampler.draw(50, generator, torch.device("cpu")).diff() for _ in range(400)])
    assert math.isclose(float(gaps.mean()), 10 / 51, rel_tol=0.02)
    assert math.isclose(float(gaps.std() / gaps.mean()), 50 / 51, rel_tol=0.04)
    with_gap = create_encoding("rfs(reach=10,min_gap=0.5)")
    assert float(with_gap.draw(50, generator, torch.device("cpu")).diff().min()) >= 0.1 - 1e-9


def test_kept_spacing_makes_neighbours_one_apart_on_the_training_grid():
    for name in ("rfs", "randomized"):
        encoding = create_encoding(
            f"{name}(reach=56,spacing=kept)+rope_axial", dim=32, num_heads=2, grid=(14, 14)
        )
        line = encoding.eval().prepare(Grid((1, 14)).positions()).coords[0, :, 1]
        torch.testing.assert_close(line.diff(), torch.ones(13))
    with pytest.raises(OptionError, match="Pass grid"):
        create_encoding("rfs(spacing=kept)")


def test_curriculum_widens_with_progress_and_draws_go_on_after_a_stop():
    sampler = create_encoding("shift(reach=40,curriculum=[0,30])")
    largest = []
    for progress in (0.0, 0.5, 1.0):
        starts = []
        for seed in range(200):
            set_progress(sampler, progress, seed=seed)
            starts.append(float(sampler.prepare(Grid((1, 10)).positions()).coords[0, 0, 1]))
        largest.append(max(starts))
    assert largest[0] == 0
    assert 12 <= largest[1] <= 15
    assert 27 <= largest[2] <= 30
    with pytest.raises(OptionError, match="from 0 to 1, got 2"):
        set_progress(sampler, 2)


def test_the_authors_draw_in_evaluation_too():
    sampler = create_encoding("randomized(reach=100,test=draw)").eval()
    one, two = (sampler.prepare(Grid((1, 10)).positions()).coords for _ in range(2))
    assert not torch.equal(one, two)


REFUSED = {
    "randomized(reach=196)": (
        ShapeError,
        r"randomized\(reach=196\) cannot assign distinct positions to 256 cells",
    ),
    "shift(reach=196)": (ShapeError, r"shift\(reach=196\) has no room for 256 cells"),
    "shift(reach=260,curriculum=[0,8])": (
        ShapeError,
        r"room for 4 cells beyond 256, but its curriculum ends at 8",
    ),
    "segments(canvas=100)": (ShapeError, r"segments\(canvas=100\) has no room for 256 cells"),
}


@cases("spec", REFUSED)
def test_too_small_a_reach_raises(spec):
    error, words = REFUSED[spec]
    with pytest.raises(error, match=words):
        create_encoding(spec).train().prepare(Grid((256,)).positions())


def test_bad_options_raise():
    for spec, words in {
        "shift(curriculum=[9,2])": "an increasing curriculum",
        "stretch(low=2.0,high=1.0)": "low <= high",
        "rfs(min_gap=1.0)": "min_gap",
        "gaps(rate=0.0)": "rate",
        "rfs(reach=0)": "reach",
    }.items():
        with pytest.raises(OptionError, match=words):
            create_encoding(spec)


def test_bad_draws_raise():
    sampler = create_encoding("rfs")
    pos = Grid((2, 3)).positions()
    grows = torch.tensor([0.0, 1.0, 2.0])
    with pytest.raises(OptionError, match=r"got none for rfs\.0"):
        sampler.prepare(pos, draws={"rfs.1": grows})
    with pytest.raises(ShapeError, match=r"rfs\.0 needs one position for each of 2 cells, got \(1, 3\)"):
        sampler.prepare(pos, draws={"rfs.0": grows, "rfs.1": grows})
    for bad in (grows.flip(0), torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.0, float("nan"), 1.0])):
        with pytest.raises(OptionError, match="strictly increasing positions"):
            sampler.prepare(pos, draws={"rfs.0": grows[:2], "rfs.1": bad})


def test_a_sampler_without_a_reader_of_coordinates_raises():
    with pytest.raises(UnsupportedCombination, match=r"no encoding reads them.*'rfs\+rope_axial'"):
        vispe.Attention(32, 4, "rfs(reach=28)")
    with pytest.raises(UnsupportedCombination, match=r"rfs \+ shift only moves"):
        create_encoding("rfs+shift")
    with pytest.raises(UnsupportedCombination, match="Each sampler can be used once"):
        create_encoding("rfs+rfs+rope_axial", dim=32, num_heads=2)
    for name in ("learned", "irpe", "rpb", "peg", "seqpe_input"):
        with pytest.raises(
            UnsupportedCombination, match=f"{name} looks up the cells of a grid, so it cannot follow"
        ):
            create_encoding(f"{name}+rfs", dim=32, num_heads=2, depth=2, grid=(4, 4))
    with pytest.raises(UnsupportedCombination, match="no encoding reads them"):
        timm.create_model("vit_tiny_patch16_224", depth=1, pos_embed="jitter")


SMALL = {"img_size": 64, "patch_size": 16, "embed_dim": 32, "num_heads": 2, "depth": 2, "num_classes": 3}


def vit(spec, **options):
    torch.manual_seed(0)
    return timm.create_model(
        "vit_tiny_patch16_224", **SMALL, pos_embed=spec, dynamic_img_size=True, **options
    )


@pytest.mark.slow
@every
@pytest.mark.filterwarnings("ignore:shift has no effect")
@cases("base", ["rope_axial", "alibi2d.local", "sincos2d"])
def test_a_vit_trains_with_samplers(spec, base):
    model = vit(f"{base}+{spec}").train()  # samplers come first whatever the order
    x = torch.randn(2, 3, 64, 80)
    set_progress(model, 0.5, seed=3)
    a, b = model(x), model(x)
    assert torch.equal(a, b)
    a.square().mean().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    if not (spec.startswith("stretch") and base == "sincos2d") and not (
        spec.startswith("shift") and base in ("rope_axial", "alibi2d.local")
    ):
        set_progress(model, 0.5, seed=4)
        assert not torch.equal(a, model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


def test_checkpointed_blocks_use_the_draw_of_the_first_pass():
    grads = []
    for checkpointed in (False, True):
        model = vit("rfs(reach=28)+rope_axial+alibi2d.local", patch_drop_rate=0.25).train()
        model.set_grad_checkpointing(checkpointed)
        torch.manual_seed(1)
        model(torch.randn(2, 3, 64, 64)).square().mean().backward()
        grads.append([p.grad for p in model.parameters() if p.grad is not None])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_cached_tables_and_rotations_raise_with_samplers():
    stock = timm.create_model("vit_tiny_patch16_224", **SMALL)
    with pytest.raises(
        UnsupportedCombination,
        match="the absolute table of VisionTransformer does not follow their coordinates",
    ):
        vispe.convert(stock, "rfs+rope_axial", keep_abs=True)
    eva = timm.create_model(
        "vit_small_patch16_dinov3", img_size=64, embed_dim=32, num_heads=2, depth=1, num_classes=0
    )
    with pytest.raises(
        UnsupportedCombination, match="the rotary embedding of Eva does not follow their coordinates"
    ):
        vispe.convert(eva, "rfs+alibi2d", keep_rope=True)


@pytest.mark.slow  # it compiles
# torch.compile looks at gradients of activations where a graph is cut
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_models_draw_in_every_pass():
    model = vit("rfs(reach=28)+rope_axial").train()
    x = torch.randn(2, 3, 64, 64)
    run = torch.compile(model, backend="eager")
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(run(x))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    for step in range(4):
        set_progress(model, step / 4, seed=step)
        eager = model(x)
        torch.testing.assert_close(run(x), eager)


def test_a_saved_model_is_rebuilt():
    model = vit("rfs(reach=28)+rope_axial")
    loaded = vit("rfs(reach=28)+rope_axial")
    loaded.load_state_dict(model.state_dict(), strict=True)
    assert loaded.vispe.saved == model.vispe.saved
    assert "rfs" in vispe.describe(model)


def test_alibi_with_sampled_distances():
    encoding = create_encoding("alibi(randomized_offsets=50,both_sides=true)", num_heads=2)
    pos = encoding.prepare(Grid((9,), prefix=1).positions())
    dense = encoding.bias(pos, 0).dense()[0]
    steps = -dense / torch.tensor(encoding.head_slopes())[:, None, None]
    for j in range(-8, 9):  # one distance for each offset; the left side is half a token nearer
        line = steps[:, 1:, 1:].diagonal(j, 1, 2)
        torch.testing.assert_close(line, line[:, :1].expand_as(line))
    right, left = steps[0, 1, 1:], steps[0, 1:, 1]
    for side, offset in ((right, 0.0), (left, 0.5)):
        distances = side[1:] + offset
        torch.testing.assert_close(distances, distances.round())
        assert bool((distances.diff() > 0).all())
        assert distances[0] >= 1
        assert distances[-1] < 50
    assert not dense[:, 0].any()
    assert encoding.prepare(pos) is pos
    encoding.eval()
    plain_pos = encoding.prepare(Grid((9,)).positions())
    evaluated = -encoding.bias(plain_pos, 0).dense()[0] / torch.tensor(encoding.head_slopes())[:, None, None]
    torch.testing.assert_close(evaluated[0, 0], torch.tensor([0.0, 5, 11, 16, 22, 27, 33, 38, 44]))
    with pytest.raises(
        ShapeError, match=r"randomized_offsets=50\) cannot assign distinct distances to 59 offsets"
    ):
        encoding.bias(encoding.prepare(Grid((60,)).positions()), 0)
    with pytest.raises(OptionError, match="have no effect with randomized_offsets=None"):
        create_encoding("alibi(both_sides=true)", num_heads=2)
    with pytest.raises(ShapeError, match="alibi needs the tokens of a 1-axis grid"):
        encoding.train().prepare(Positions(torch.rand(4, 1)))
