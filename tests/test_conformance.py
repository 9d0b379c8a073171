"""What every registered encoding must keep, in every preset and with every option."""

import copy
import inspect
import io
import json
import pickle
import random

import numpy as np
import pytest
import torch

from vispe import Grid, create_encoding, list_encodings
from vispe.attention import attention
from vispe.base import KINDS, Additive, Biased, Encoding, Rotary, bias_of, transform_of, value_term_of
from vispe.errors import OptionError, ShapeError
from vispe.registry import encoding_class, encoding_info

DIM, HEADS, DEPTH = 24, 3, 4
FACTS = {"dim": DIM, "num_heads": HEADS, "depth": DEPTH, "grid": (3, 4)}
OPTIONS = {
    "alibi": [
        "slopes=learned",
        "slopes=learned,softplus=true",
        "slopes=geometric",
        "layers=[0,2]",
        "biased_heads=2",
    ],
    "alibi2d": [
        "metric=manhattan",
        "metric=chebyshev",
        "metric=squared",
        "metric=squared,wrap=false,normalize=none",
        "wrap=false",
        "normalize=none",
        "normalize=reference,reference=[5,7]",
        "slopes=geometric",
        "slopes=alibi",
        "slopes=learned",
        "slopes=learned,softplus=true",
        "slopes=learned,biased_heads=2",
        "spacing=[2,0.5]",
        "layers=[0,2]",
        "jitter=0.5",
        "biased_heads=2",
    ],
    "sincos2d": ["temperature=100", "std=0.02"],
    "learned": ["std=0.5"],
}
NAMES = [*list_encodings(), *list_encodings("*.*")]
SPECS = [*NAMES, *(f"{name}({option})" for name, options in OPTIONS.items() for option in options)]
SUMS = ["sincos2d+alibi2d", "learned+alibi2d(slopes=learned)+alibi2d.local"]
every = pytest.mark.parametrize("spec", SPECS + SUMS)


def build(spec, **facts):
    return create_encoding(spec, **{**FACTS, **facts})


def shapes(encoding):
    """Return odd grids of the number of axes that all parts accept."""
    axes = max(set.intersection(*(set(e.ndim) for e in encoding.parts())))
    return {
        1: [(7,), (1,), (12,)],
        2: [(3, 4), (5, 2), (1, 1), (1, 6), (7, 1), (6, 6)],
        3: [(2, 3, 2), (1, 1, 1), (1, 2, 5)],
    }[min(axes, 2) if axes == 3 and len(encoding.parts()) > 1 else axes]


def positions(encoding, shape, prefix=1, **arguments):
    return encoding.prepare(Grid(shape, prefix=prefix, **arguments).positions())


def run(encoding, pos, seed=0, dtype=torch.float32, layers=(0, 2)):
    """Return what a small model with the encoding gives: tokens plus table, then attention in some blocks."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, pos.tokens, DIM, generator=generator).to(dtype)
    return forward(encoding, pos, x, layers)


def forward(encoding, pos, x, layers=(0, 2)):
    parts = encoding.parts()
    for e in parts:
        if isinstance(e, Additive):
            x = x + e.table(pos).to(x.dtype)
    for layer in layers:
        heads = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        out = attention(
            heads,
            heads,
            heads,
            bias=bias_of(parts, pos, layer, x),
            transform=transform_of(parts, pos, layer, x),
            value_term=value_term_of(parts, pos, layer),
        )
        x = x + out.transpose(1, 2).flatten(2)
    return x


def tensors_of(encoding, pos):
    """Return all that the encoding alone makes: tables, and dense biases of each block."""
    made = [e.table(pos) for e in encoding.parts() if isinstance(e, Additive)]
    for layer in range(DEPTH):
        bias = bias_of(encoding.parts(), pos, layer)
        if bias is not None:
            made.append(bias.dense())
    return made


@every
def test_builds_on_the_meta_device(spec):
    with torch.device("meta"):
        encoding = build(spec)
    assert all(p.is_meta for p in encoding.parameters())
    pos = Grid(shapes(encoding)[0], prefix=1).positions("meta")
    assert forward(encoding, pos, torch.empty(2, pos.tokens, DIM, device="meta")).is_meta
    encoding.to_empty(device="cpu").reset_parameters()
    assert all(p.isfinite().all() for p in encoding.parameters())


@every
def test_config_and_spec_rebuild_it(spec):
    encoding = build(spec)
    assert create_encoding(json.loads(json.dumps(encoding.config))).config == encoding.config
    assert build(json.loads(json.dumps(encoding.spec))).config == encoding.config
    assert build(encoding.config).config == encoding.config
    for part in encoding.parts():
        assert list(part.config) == ["name", *inspect.signature(type(part)).parameters]
        options = {k: v for k, v in part.spec.items() if k != "name"}
        assert not set(options) & set(FACTS)
        text = f"{part.name}({','.join(f'{k}={v!r}' for k, v in options.items())})"
        assert build(text).config == part.config
        assert build(text.replace("=", ":")).config == part.config
        assert part.name in repr(part) or type(part).__name__ in repr(part)


@every
def test_copies_are_equal(spec):
    encoding = build(spec).eval()
    pos = positions(encoding, shapes(encoding)[0])
    wanted = run(encoding, pos)
    buffer = io.BytesIO()
    torch.save(encoding.state_dict(), buffer)
    buffer.seek(0)
    fresh = build(spec).eval()
    fresh.load_state_dict(torch.load(buffer, weights_only=True), strict=True)
    for other in (copy.deepcopy(encoding), pickle.loads(pickle.dumps(encoding)), fresh):
        assert other.config == encoding.config
        assert not other.training
        assert torch.equal(run(other, positions(other, shapes(other)[0])), wanted)
        for mine, yours in zip(encoding.parameters(), other.parameters(), strict=True):
            assert mine is not yours
    assert not list(encoding.buffers())  # what can be made again is not kept


@every
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_finite_in_every_dtype(spec, dtype):
    encoding = build(spec).to(dtype)
    for shape in shapes(encoding):
        pos = positions(encoding, shape)
        out = run(encoding, pos, dtype=dtype)
        assert out.dtype == dtype
        assert out.isfinite().all()
        assert all(t.dtype in (torch.float32, torch.float64) for t in tensors_of(encoding, pos))


@every
def test_what_has_no_parameters_is_unchanged_by_half_precision(spec):
    encoding = build(spec).eval()
    pos = positions(encoding, shapes(encoding)[0])
    before = tensors_of(encoding, pos)
    encoding.half().float()
    if not list(encoding.parameters()):
        after = tensors_of(encoding, positions(encoding, shapes(encoding)[0]))
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(before, tensors_of(encoding, pos), strict=True))


@every
@pytest.mark.parametrize("prefix", [1, 5])
def test_prefix_tokens_are_untouched(spec, prefix):
    encoding = build(spec).eval()
    for shape in shapes(encoding):
        pos, bare = positions(encoding, shape, prefix), positions(encoding, shape, 0)
        for part in encoding.parts():
            if isinstance(part, Additive):
                table = part.table(pos)
                assert table.shape == (1, pos.tokens, DIM)
                assert (table[:, :prefix] == 0).all()
                torch.testing.assert_close(table[:, prefix:], part.table(bare), rtol=1e-6, atol=1e-6)
            if isinstance(part, Biased) and part.bias(pos, 0) is not None:
                dense = part.bias(pos, 0).dense()
                assert dense.shape == (1, dense.shape[1], pos.tokens, pos.tokens)
                assert (dense[..., :prefix, :] == 0).all()
                assert (dense[..., :prefix] == 0).all()
                assert torch.equal(dense[..., prefix:, prefix:], part.bias(bare, 0).dense())
            if isinstance(part, Rotary):
                x = torch.randn(1, HEADS, pos.tokens, DIM // HEADS)
                transform = part.transform(pos, 0)
                assert torch.equal(transform.query(x)[:, :, :prefix], x[:, :, :prefix])


@every
def test_a_larger_grid_after_a_small_one(spec):
    encoding, again = build(spec).eval(), None
    sizes = shapes(encoding)
    for shape in (sizes[0], sizes[-1], sizes[0]):
        found = run(encoding, positions(encoding, shape))
        again = copy.deepcopy(encoding)
        assert torch.equal(found, run(again, positions(again, shape)))


@every
def test_eval_is_deterministic_and_leaves_global_random_states(spec):
    encoding = build(spec).eval()
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    first = run(encoding, positions(encoding, shapes(encoding)[0]))
    second = run(encoding, positions(encoding, shapes(encoding)[0]))
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]  # noqa: NPY002


@every
def test_training_draws_come_from_the_given_generator(spec):
    encoding = build(spec).train()
    grid = Grid(shapes(encoding)[0], prefix=1)
    state = torch.get_rng_state()
    outs = []
    for seed in (1, 1, 2):
        pos = encoding.prepare(grid.positions(), generator=torch.Generator().manual_seed(seed))
        outs.append(run(encoding, pos))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2]) == ("jitter" not in str(spec))


@every
def test_every_parameter_learns(spec):
    encoding = build(spec).train()
    out = run(encoding, positions(encoding, shapes(encoding)[0]))
    out.backward(torch.randn_like(out)) if out.requires_grad else None
    for name, parameter in encoding.named_parameters():
        assert parameter.grad is not None, name
        assert (parameter.grad != 0).all(), name
    assert encoding.no_weight_decay() == {name for name, _ in encoding.named_parameters()}


COMPILED = [*list_encodings(), "alibi2d(slopes=learned,softplus=true)", SUMS[-1]]


@pytest.mark.parametrize("spec", COMPILED)
def test_compiles_in_one_graph_with_two_grids(spec):
    torch._dynamo.reset()
    encoding = build(spec).eval()

    def model(x, grid):
        return forward(encoding, encoding.prepare(grid.positions(x.device)), x)

    backend = "aot_eager" if list(encoding.parameters()) else "eager"
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for shape in (shapes(encoding)[0], shapes(encoding)[-1]):
        grid = Grid(shape, prefix=1)
        x = torch.randn(2, grid.tokens, DIM)
        torch.testing.assert_close(compiled(x, grid), model(x, grid), rtol=1e-5, atol=1e-5)


@every
def test_dropped_tokens_take_their_rows_along(spec):
    encoding = build(spec).train()  # jitter included: it is drawn before tokens are dropped
    for shape in shapes(encoding):
        pos = positions(encoding, shape, prefix=2)
        keep = torch.stack(
            [torch.cat([torch.arange(2), 2 + torch.randperm(pos.tokens - 2)[:3]]) for _ in range(3)]
        )
        kept = pos.gather(keep)
        for part in encoding.parts():
            if isinstance(part, Additive):
                table, few = part.table(pos).expand(3, -1, -1), part.table(kept)
                for i in range(3):
                    torch.testing.assert_close(few[i], table[i, keep[i]])
            bias = part.bias(pos, 0) if isinstance(part, Biased) else None
            if bias is not None:
                dense, few = bias.dense()[0], part.bias(kept, 0).dense()
                for i in range(3):
                    torch.testing.assert_close(few[i], dense[:, keep[i]][:, :, keep[i]])


@pytest.mark.parametrize("name", list_encodings())
def test_docstrings_say_what_users_ask(name):
    cls = encoding_class(name)
    text = inspect.getdoc(cls)
    for line in ("Shapes:", "New resolution:", "Cost:", "Invariant to:", "Differs from the reference:"):
        assert line in text, line
    info = encoding_info(name)
    assert info.summary.endswith(".")
    assert info.kinds or name == "none"
    assert info.paper.partition("https://")[2] or name == "none"
    assert 1990 < info.year < 2100 or name == "none"
    for p in inspect.signature(cls).parameters.values():
        assert p.kind is p.KEYWORD_ONLY
        assert f"    {p.name}: " in text, p.name
        json.dumps(None if p.default is p.empty else p.default)
    for preset, options in cls.presets.items():
        assert f"{name}.{preset}" in text
        build(f"{name}.{preset}")
        assert set(options) <= set(info.options)


@pytest.mark.parametrize("name", list_encodings())
def test_axes(name):
    encoding = build(name)
    for axes in (1, 2, 3):
        grid = Grid((2, 3, 2)[:axes], prefix=1)
        if axes in encoding.ndim:
            assert run(encoding, encoding.prepare(grid.positions())).isfinite().all()
        else:
            with pytest.raises(ShapeError, match=rf"{name} needs .*axis|{name} needs .*axes"):
                run(encoding, encoding.prepare(grid.positions()))


@pytest.mark.parametrize("name", list_encodings())
def test_every_class_is_of_a_kind(name):
    cls = encoding_class(name)
    assert issubclass(cls, Encoding)
    assert [k for k, base in KINDS.items() if issubclass(cls, base)] == list(encoding_info(name).kinds)
    made = build(name)
    assert made.parts() == (made,)
    assert made.extra_repr() == ", ".join(f"{k}={v}" for k, v in made.config.items() if k != "name")


@pytest.mark.parametrize(
    ("spec", "facts", "message"),
    [
        ("sincos2d", {"dim": 6}, "sincos2d needs a width divisible by 4, got dim=6"),
        ("sincos2d", {"dim": 0}, "got dim=0"),
        ("sincos2d(temperature=0)", {}, "positive numbers, got temperature=0"),
        ("sincos2d(std=-1)", {}, "positive numbers, got .*std=-1"),
        ("learned", {"grid": (3,)}, r"grid of two whole numbers above 0, got grid=\(3,\)"),
        ("learned", {"grid": (3, 0)}, "grid of two whole numbers"),
        ("learned(std=-1)", {}, "std of 0 or more, got dim=24, std=-1"),
        ("alibi2d", {"num_heads": 0}, "at least one head, got num_heads=0"),
        (
            "alibi2d(slopes=constnt)",
            {},
            "slopes must be one of constant, geometric, alibi, learned, got 'constnt'",
        ),
        ("alibi2d(softplus=true)", {}, "softplus keeps learned slopes positive, but slopes='constant'"),
        ("alibi2d(metric=euclid)", {}, "metric must be one of euclidean"),
        ("alibi2d(normalize=diagonal)", {}, "normalize must be one of max, reference, none, got 'diagonal'"),
        ("alibi2d(normalize=None)", {}, "normalize must be one of .* got None"),
        ("alibi2d(wrap=maybe)", {}, "wrap is true or false, got wrap='maybe'"),
        ("alibi2d(slopes=learned,softplus=1)", {}, "softplus is true or false, got softplus=1"),
        ("alibi2d(reference=[4,4])", {}, r"reference=\[4, 4\] has no effect with normalize='max'"),
        (
            "alibi2d(normalize=reference,reference=[4])",
            {},
            r"one number above 0 for each of 2 axes, got \[4\]",
        ),
        ("alibi2d(normalize=reference,reference=[4,0])", {}, r"above 0 .* got \[4, 0\]"),
        ("alibi2d(normalize=reference,reference=[4,2.5])", {}, r"reference needs a list of whole numbers"),
        ("alibi2d(spacing=2)", {}, "one positive number for each of 2 axes, got spacing=2"),
        ("alibi2d(spacing=[1,-1])", {}, "one positive number"),
        ("alibi2d(layers=3)", {}, "layers needs a list of whole numbers, got layers=3"),
        ("alibi2d(layers=[0.5])", {}, "layers needs a list of whole numbers"),
        ("alibi2d(layers=[0,4])", {}, r"block indices below depth=4, got \[4\]"),
        ("alibi2d(layers=[-1])", {}, r"block indices below depth=4, got \[-1\]"),
        ("alibi2d(jitter=-1)", {}, "jitter is a standard deviation, got jitter=-1"),
        ("alibi2d(jitter=much)", {}, "jitter is a standard deviation, got jitter='much'"),
        ("alibi2d(jitter=true)", {}, "jitter is a standard deviation, got jitter=True"),
        ("alibi2d(biased_heads=4)", {}, "between 1 and num_heads=3, got 4"),
        ("alibi2d(biased_heads=0)", {}, "between 1 and num_heads=3, got 0"),
        ("alibi2d(biased_heads=1.5)", {}, r"between 1 and num_heads=3, got 1\.5"),
    ],
)
def test_option_errors(spec, facts, message):
    with pytest.raises(OptionError, match=message):
        build(spec, **facts)
