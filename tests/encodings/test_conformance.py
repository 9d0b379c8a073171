"""Contract of every registered encoding, in every preset and with every option."""

import copy
import inspect
import io
import itertools
import json
import pickle
import random
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch

import vispe
from tests.cases import cases, run_cases
from vispe import create_encoding, list_encodings
from vispe.encodings.attention_layer import attend
from vispe.encodings.base import Additive, Biased, Encoding, Mixing, Rotary
from vispe.encodings.metadata import encoding_info
from vispe.encodings.registry import KINDS, encoding_class
from vispe.errors import OptionError, ShapeError

DIM, HEADS, DEPTH = 24, 3, 4
FACTS = {"dim": DIM, "num_heads": HEADS, "depth": DEPTH, "grid": (3, 4)}
OPTIONS = {name: encoding_class(name).tested_options for name in list_encodings() if "." not in name}
# methods for one direction, which refuse attention until it is promised to be causal
PROMISED = {"xpos": "xpos(causal=true)", "path": "path(causal=true)"}
# options that draw at random while training
DRAWN = ("jitter", "dropout", "shift_coords", "jitter_coords", "rescale_coords")
TOKENS_COUNT = "its factor is the logarithm of the number of tokens; tests/encodings/rotary/test_ssmax.py"
# check -> encoding or spec -> why the check is not meant for it
EXCLUDED = {
    "every_parameter_learns": {
        "loope": "starts exactly at the static order, by a last layer of zeros; test_loope has the steps that follow",
        "neuda": "a small grid does not reach every anchor; test_neuda.py has the gradients of those that it does",
        "neuda.released": "a small grid does not reach every anchor",
        "legendre.haar": "a small grid does not reach every wavelet",
        "rpb(window=[2,5])": "another grid does not read every entry of the table",
        "rpb(window=[5,7],resample=bicubic)": "another grid does not read every entry of the table",
        "seqpe.vit_b": "a small grid does not have every digit",
        "seqpe.vit_s": "a small grid does not have every digit",
        "seqpe_input": "a small grid does not have every digit",
        "seqpe": "a small grid does not have every digit",
        "irpe": "a small grid does not reach every bucket",
        "transformer_xl": "v meets r, which is 0 at first; test_transformer_xl has the step that follows",
        "deberta": "a small grid does not reach every bucket; test_deberta has the rest",
        "deberta.scratch": "a small grid does not reach every bucket",
        "shaw(clip=[2,1],index=key_query,method=key_query)": "row 1 of 3 x 4 patches has no offset of 2 to each side",
        "shaw(clip=[3,3],method=distance_factor,shared=false)": "a small grid does not reach every distance",
        **dict.fromkeys(list_encodings("irpe.*"), "a small grid does not reach every bucket"),
        "fire.causal": "units for the far end of 512 tokens are off in a short sequence",
        **dict.fromkeys(["t5", *list_encodings("t5.*")], "a small grid does not reach every bucket"),
        "selective_rope": "starts as RoPE, by a matrix of zeros; test_context has the step that follows",
        "psc": "starts as the identity, by matrices of zeros; test_psc has the step that follows",
        "psc+rope_axial": "starts as the identity, by matrices of zeros; test_psc has the step that follows",
        "gpsa": "softmax does not see what all offsets share; test_gpsa.py checks the other gradients",
        "distance_bank": "a small grid does not reach every distance",
        "distance_bank.inkling": "a small grid does not reach every distance",
        "cope": "a small grid does not reach every count",
        **dict.fromkeys(
            [
                "rope_axial(basis=head)",
                "rope_mixed(layout=half,basis=head)",
                "rope_dinov3(basis=head,basis_key=same)",
                "rope_field(basis=head,layout=half)",
            ],
            "rotations inside pairs commute with the encoding at the identity; test_head_basis.py has random matrices",
        ),
        "rose.scale": "ln(s) and c are 0 at spacing 1; test_rose.py has gradients at other values",
        "rose(spacing_scale=log,learn_scale=true,spacing=[2,0.5])": "a = 0 at first, so b has no gradient",
        "sincos3d_points": "a ReLU unit may be off at all of the few points of a small grid",
    },
    "prefix_tokens_are_untouched": {
        **dict.fromkeys(
            ["distance_bank", "distance_bank.inkling", "pape", "pape.ri"],
            "another size rounds otherwise; their own tests have a tolerance",
        ),
        "tra": "is all of the logits, and keeps prefix tokens by content; see tests/encodings/bias/test_cope.py",
        "gpsa": "its softmax by offsets leaves prefix tokens out, by -inf; see tests/encodings/bias/test_gpsa.py",
        **dict.fromkeys(
            [
                "transformer_xl",
                "transformer_xl.xlnet",
                "deberta",
                "deberta.scratch",
                "decomposed",
                "decomposed.mvitv2",
            ],
            "another size rounds otherwise; the encoding's own test has a tolerance",
        ),
        "grape_alibi.query_key": "rounding of softplus depends on the memory address; test_grape.py has a tolerance",
        "grape_alibi.key": "rounding of softplus depends on the memory address; test_grape.py has a tolerance",
        "grape_alibi": "rounding of softplus depends on the memory address; test_grape.py has a tolerance",
        "pope": "their channels become magnitudes as well; test_pope.py tests the invariants",
        "pope.text": "their channels become magnitudes as well; test_pope.py tests the invariants",
        "loope(context=none,class_token=origin)": "as in the reference, the class token is in front of patch 1",
        "positional_attention": "another size rounds otherwise; its own test has a tolerance",
        "tapa": "is all of the logits: pairs with a prefix token keep their product; see its own test",
        "self_extend": "is all of the logits: prefix tokens meet turned patches, as with rope_axial; see its own test",
        "hope_hyperbolic": "is all of the logits: pairs with a prefix token keep their product; see its own test",
        "path": "is all of the logits: pairs with a prefix token keep their product; see its own test",
        "seqpe(mode=attn_scalar)": "another size rounds otherwise; test_seqpe.py has a tolerance",
        "seqpe.vit_b": "class_vector gives them vectors of their own",
        "seqpe.vit_s": "class_vector gives them vectors of their own",
        "comrope_ap.reference": "as in the reference, class tokens stand in the centre of the image",
        "comrope_ld.reference": "as in the reference, class tokens stand in the centre of the image",
        **dict.fromkeys(["ssmax", *list_encodings("*ssmax.*"), "bam_ssmax"], TOKENS_COUNT),
        "kerple(weighted=true)": "whole logits: prefix tokens keep their products of queries and keys",
        "dape": "rounding of products depends on the memory address; test_dape.py has a tolerance",
    },
    "training_draws_come_from_the_given_generator": {
        "seqpe.vit_b": "draws dropout; tests/encodings/rotary/test_seqpe.py has the same check",
        "seqpe.vit_s": "draws dropout; tests/encodings/rotary/test_seqpe.py has the same check",
    },
    "dropped_tokens_take_their_rows_along": {
        **dict.fromkeys(
            ["fox", "cable"], "dropped patches cost nothing; see tests/encodings/bias/test_fox.py"
        ),
        "grape_path": "refuses dropped tokens; see tests/encodings/rotary/test_grape.py",
        **dict.fromkeys(["bam_ssmax", *list_encodings("bam_ssmax.*")], TOKENS_COUNT),
        "path": "refuses dropped tokens; see its own test",
        "dape(version=2,inner=alibi2d.local,width=4,kernel=5)": "refuses dropped tokens; see test_dape.py",
        "dape(inner=alibi(slopes=learned),version=2,causal=true,negative_slope=0.2)": "refuses dropped tokens",
        "cope": "counts the tokens that are left; see tests/encodings/bias/test_cope.py",
        "tra": "counts the tokens that are left; see tests/encodings/bias/test_cope.py",
    },
}
NAMES = [*list_encodings(), *list_encodings("*.*")]
SPECS = [*NAMES, *(f"{name}({option})" for name, options in OPTIONS.items() for option in options)]
PLAIN = list_encodings()
SUMS = ["psc+rope_axial", "sincos2d+alibi2d", "learned+alibi2d(slopes=learned)+alibi2d.local"]
CHECKS: dict[str, Callable] = {}


def check(function):
    """Register a check of one encoding; `full` runs all sizes, otherwise a part, fewer with presets and options."""
    CHECKS[function.__name__] = function
    return function


def Grid(shape, **arguments):
    """Return a grid as hosts create it, with their training size."""
    return vispe.Grid(shape, **{"reference": shape, **arguments})


def build(spec, **facts):
    spec = PROMISED.get(spec, spec) if isinstance(spec, str) else spec
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


def image(pos):
    """Return an image (1, 3, 8 h, 8 w) for encodings that read it, fixed for each grid."""
    if pos.grid is None or pos.axes != 2:
        return None
    h, w = (8 * n for n in pos.grid.shape)
    device = pos.coords.device
    rows, columns = torch.arange(h, device=device)[:, None] + 0.5, torch.arange(w, device=device) * 1.3
    return torch.stack([(rows * columns * k).sin() + k / 5 for k in (0.05, 0.3, 0.7)])[None]


def run(encoding, pos, seed=0, dtype=torch.float32, layers=(0, 2)):
    """Return the output of a small model with the encoding: tokens plus table, then attention in some blocks."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, pos.tokens, DIM, generator=generator).to(dtype)
    return forward(encoding, pos, x, layers)


def forward(encoding, pos, x, layers=(0, 2)):
    parts = encoding.parts()
    for e in parts:
        if isinstance(e, Additive):
            x = e.embed(x, pos, image(pos))
    for layer in layers:
        heads = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        out = attend(heads, heads, heads, parts, pos, layer, x)
        x = x + out.transpose(1, 2).flatten(2)
        for e in parts:
            if isinstance(e, Mixing):
                x = e.mix(x, pos, layer)
    return x


def content(pos, keep=None):
    """Return q and k of each token, which biases may read; those of patches do not depend on prefix tokens."""
    x = torch.randn(2, HEADS, 128, DIM // HEADS, generator=torch.Generator().manual_seed(3))
    x = x[..., -pos.tokens :, :].to(pos.coords.device)
    q, k = (t[None] for t in x) if keep is None else (t[:, keep].transpose(0, 1) for t in x)
    return {"q": q, "k": k, "scale": 0.5}


def tokens(pos):
    """Return tokens (1, n, DIM) that encodings with gates may read; as in `content`, independent of prefix tokens."""
    x = torch.randn(1, 128, DIM, generator=torch.Generator().manual_seed(4))
    return x[:, -pos.tokens :].to(pos.coords.device)


def added(part, pos, x=None):
    """Return the table of an additive encoding, (1 or b, n, DIM)."""
    if not part.reads_tokens:
        return part.table(pos, image(pos))
    x = tokens(pos) if x is None else x
    return part.embed(x, pos, image(pos)) - x


def biases(part, pos, layer=0, x=None):
    """Return the biases of all softmaxes of a block."""
    if not isinstance(part, Biased):
        return []
    x = tokens(pos) if x is None else x
    candidates = (
        [b.bias for b in part.branches(pos, layer, x)] if part.multi_softmax else [part.bias(pos, layer, x)]
    )
    return [bias for bias in candidates if bias is not None]


def transforms(part, pos):
    """Return the transforms of all softmaxes of block 0."""
    if not isinstance(part, Rotary):
        return []
    x = tokens(pos)
    candidates = (
        [b.transform for b in part.branches(pos, 0, x)] if part.multi_softmax else [part.transform(pos, 0, x)]
    )
    return [transform for transform in candidates if transform is not None]


def tensors_of(encoding, pos, layers=range(DEPTH)):
    """Return all tensors of the encoding: tables, and dense biases of some blocks."""
    tensors = [added(e, pos) for e in encoding.parts() if isinstance(e, Additive)]
    for part, layer in itertools.product(encoding.parts(), layers):
        tensors += [bias.dense(**content(pos)) for bias in biases(part, pos, layer)]
    return tensors


@check
def builds_on_the_meta_device(spec, full):
    with torch.device("meta"):
        encoding = build(spec)
    assert all(p.is_meta for p in encoding.parameters())
    pos = Grid(shapes(encoding)[0], prefix=1).positions("meta")
    if full or spec in PLAIN + SUMS:
        x = torch.empty(2, pos.tokens, DIM, device="meta")
        assert forward(encoding, pos, x, layers=(0, 2) if full else (0,)).is_meta
    else:  # attention itself, which takes most of the time, does not depend on options
        assert all(tensor.is_meta for tensor in tensors_of(encoding, pos, layers=(0,)))
        assert all(transforms(part, pos) for part in encoding.parts() if isinstance(part, Rotary))
    encoding.to_empty(device="cpu").reset_parameters()
    assert all(p.isfinite().all() for p in encoding.parameters())


@check
def config_and_spec_rebuild_it(spec, full):
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


@check
def copies_are_equal_after_other_grids(spec, full):
    """Copies, pickles and checkpoints, also after a larger grid; the global random state is unused and unchanged."""
    encoding = build(spec).eval()
    sizes, layers = shapes(encoding), (0, 2) if full else (2,)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    small = run(encoding, positions(encoding, sizes[0]), layers=layers)
    assert torch.equal(torch.get_rng_state(), states[0])
    fresh = build(spec).eval()
    state = torch.get_rng_state()  # parameters are drawn
    buffer = io.BytesIO()
    torch.save(encoding.state_dict(), buffer)
    buffer.seek(0)
    fresh.load_state_dict(torch.load(buffer, weights_only=True), strict=True)
    # before the small grid, the original after it
    large = run(fresh, positions(fresh, sizes[-1]), layers=layers)
    assert torch.equal(run(encoding, positions(encoding, sizes[-1]), layers=layers), large)
    assert torch.equal(run(encoding, positions(encoding, sizes[0]), layers=layers), small)
    for other in (copy.deepcopy(encoding), pickle.loads(pickle.dumps(encoding)), fresh):
        assert other.config == encoding.config
        assert not other.training
        assert torch.equal(run(other, positions(other, sizes[0]), layers=layers), small)
        for mine, theirs in zip(encoding.parameters(), other.parameters(), strict=True):
            assert mine is not theirs
        if full:
            assert torch.equal(run(other, positions(other, sizes[-1]), layers=layers), large)
    assert {name for name, _ in encoding.named_buffers()} <= set(encoding.state_dict())  # all are saved
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]  # noqa: NPY002


@check
def finite_in_every_dtype(spec, full):
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        encoding = build(spec).to(dtype)
        sizes = shapes(encoding)
        if dtype == torch.float16 or (full and dtype != torch.float32):
            sizes = sizes[:3]  # one of them is a single cell
        elif not full and spec not in PLAIN:
            continue
        elif not full:
            sizes = sizes[1:5:2] if dtype == torch.float32 else sizes[:1]
        for shape in sizes:
            pos = positions(encoding, shape)
            out = run(encoding, pos, dtype=dtype, layers=(0, 2) if full else (0,))
            assert out.dtype == dtype
            assert out.isfinite().all(), dtype
            tested = full or (shape == sizes[0] and (spec in PLAIN or dtype == torch.float16))
            tensors = tensors_of(encoding, pos, range(DEPTH) if full else (0, DEPTH - 1)) if tested else []
            assert all(t.dtype in (torch.float32, torch.float64) for t in tensors), dtype


@check
def what_saves_nothing_is_unchanged_by_half_precision(spec, full):
    encoding = build(spec).eval()
    if list(encoding.parameters()):
        return
    pos = positions(encoding, shapes(encoding)[0])
    before = tensors_of(encoding, pos)
    encoding.half().float()
    after = tensors_of(encoding, positions(encoding, shapes(encoding)[0]))
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, tensors_of(encoding, pos), strict=True))


@check
def buffers_are_unchanged_by_half_precision(spec, full):
    """Fixed frequencies and locations: rounded to bfloat16 they would be off by radians at position 10,000."""
    encoding = build(spec)
    before = {name: b.clone() for name, b in encoding.named_buffers() if b.is_floating_point()}
    for cast in (torch.nn.Module.half, torch.nn.Module.bfloat16, lambda m: m.double().to(torch.bfloat16)):
        cast(encoding)
        for name, expected in before.items():
            assert encoding.get_buffer(name).dtype == torch.float32
            assert torch.equal(encoding.get_buffer(name), expected)


@check
def prefix_tokens_are_untouched(spec, full):
    encoding = build(spec).eval()
    sizes = shapes(encoding)
    grids = [(shape, (5, 1, 1, 5)[k]) for k, shape in enumerate(sizes[: 4 if spec in PLAIN else 2])]
    for shape, prefix in itertools.product(sizes, (1, 5)) if full else grids:
        pos, without_prefix = positions(encoding, shape, prefix), positions(encoding, shape, 0)
        for part in encoding.parts():
            if isinstance(part, Additive):
                table = added(part, pos)
                assert table.shape == (1, pos.tokens, DIM)
                assert (table[:, :prefix] == 0).all()
                torch.testing.assert_close(
                    table[:, prefix:], added(part, without_prefix), rtol=1e-6, atol=1e-6
                )
            for bias, without in zip(biases(part, pos), biases(part, without_prefix), strict=True):
                dense = bias.dense(**content(pos))
                assert dense.shape == (1, dense.shape[1], pos.tokens, pos.tokens)
                assert (dense[..., :prefix, :] == 0).all()
                assert (dense[..., :prefix] == 0).all()
                # gates are products of the tokens, which round differently for other numbers of tokens
                tol = 1e-6 if part.reads_tokens else 0.0
                expected = without.dense(**content(without_prefix))
                torch.testing.assert_close(dense[..., prefix:, prefix:], expected, rtol=tol, atol=tol)
            for transform in transforms(part, pos):
                x = torch.randn(1, HEADS, pos.tokens, DIM // HEADS)
                rotated = transform.query(x)[:, :, :prefix]  # wider than x where a transform expands
                assert torch.equal(rotated[..., : x.shape[-1]], x[:, :, :prefix])
                assert not rotated[..., x.shape[-1] :].any()


@check
def training_draws_come_from_the_given_generator(spec, full):
    encoding = build(spec).train()
    grid = Grid(shapes(encoding)[0], prefix=1)
    state = torch.get_rng_state()
    draws = any(getattr(e, name, None) for e in encoding.parts() for name in DRAWN)
    outs = []
    for seed in (1, 1, 2) if draws or full else (1, 2):
        pos = encoding.prepare(grid.positions(), generator=torch.Generator().manual_seed(seed))
        outs.append(run(encoding, pos))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(outs[0], outs[-2])
    assert torch.equal(outs[0], outs[-1]) == (not draws)


@check
def every_parameter_learns(spec, full):
    encoding = build(spec).train()
    out = run(encoding, positions(encoding, shapes(encoding)[0]), layers=range(DEPTH))
    out.backward(torch.randn_like(out)) if out.requires_grad else None
    for name, parameter in encoding.named_parameters():
        if not parameter.requires_grad:  # saved, not trained
            continue
        assert parameter.grad is not None, name
        assert (parameter.grad != 0).all(), name
    assert encoding.no_weight_decay() == {name for name, _ in encoding.named_parameters()}


COMPILED = [*list_encodings(), "alibi2d(slopes=learned,softplus=true)", SUMS[-1]]
# of each kind: their backward pass is also traced for free sizes, which takes seconds
FREE = ["learned", "rpb_cpb", "rope_mixed", "peg", SUMS[-1]]


@pytest.mark.slow
@pytest.mark.parametrize("spec", COMPILED)
def test_compiles_in_one_graph_with_two_grids(spec):
    torch._dynamo.reset()
    encoding = build(spec).eval()
    leaves = [p for p in encoding.parameters() if p.requires_grad]
    graphs = []

    def model(x, grid):
        # one block: hosts have tests of several in one graph
        return forward(encoding, encoding.prepare(grid.positions(x.device)), x, layers=(0,))

    def backend(graph, inputs):
        graphs.append(graph)
        traced = leaves and (len(graphs) == 1 or spec in FREE)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs) if traced else graph.forward

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for shape in (shapes(encoding)[0], shapes(encoding)[-1]):
        grid = Grid(shape, prefix=1)
        x, cotangent = torch.randn(2, 2, grid.tokens, DIM)
        out, expected = compiled(x, grid), model(x, grid)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        if leaves:
            sides = (torch.autograd.grad(o, leaves, cotangent, allow_unused=True) for o in (out, expected))
            torch.testing.assert_close(*sides, rtol=1e-4, atol=1e-5)
    assert len(graphs) == 2


@check
def dropped_tokens_take_their_rows_along(spec, full):
    encoding = build(spec).train()  # jitter included: it is drawn before tokens are dropped
    for shape in shapes(encoding) if full else shapes(encoding)[: 3 if spec in PLAIN else 1]:
        pos = positions(encoding, shape, prefix=2)
        keep = torch.stack(
            [torch.cat([torch.arange(2), 2 + torch.randperm(pos.tokens - 2)[:3]]) for _ in range(3)]
        )
        subset_pos = pos.gather(keep)
        for part in encoding.parts():
            if isinstance(part, Additive):
                table = added(part, pos).expand(3, -1, -1)
                subset = added(part, subset_pos, tokens(pos)[0, keep])
                for i in range(3):
                    torch.testing.assert_close(subset[i], table[i, keep[i]])
            subset_biases = biases(part, subset_pos, x=tokens(pos)[0, keep])
            for full_bias, subset_bias in zip(biases(part, pos), subset_biases, strict=True):
                dense = full_bias.dense(**content(pos))[0]
                subset = subset_bias.dense(**content(pos, keep))
                for i in range(3):
                    torch.testing.assert_close(subset[i], dense[:, keep[i]][:, :, keep[i]])


# these take most of the time: in the fast suite a preset or option has two of them, in turn
COSTLY = (
    "builds_on_the_meta_device",
    "copies_are_equal_after_other_grids",
    "finite_in_every_dtype",
    "training_draws_come_from_the_given_generator",
    "prefix_tokens_are_untouched",
    "dropped_tokens_take_their_rows_along",
)


def checks_of(name, full):
    """Return the cases of an encoding: every check with every preset and option; a part without `full`."""
    specs = SUMS if name == "sums" else [s for s in SPECS if re.split(r"[.(]", s)[0] == name]
    rows = []
    for k, spec in enumerate(specs):
        skipped = () if full or spec in PLAIN + SUMS else set(COSTLY) - {*COSTLY[k % 3 :: 3]}
        rows += [
            (f"{c}-{spec}", {"check": c, "spec": spec, "full": full}) for c in CHECKS if c not in skipped
        ]
    return rows


def run_check(check, spec, full):
    reasons = EXCLUDED.get(check, {})
    if {spec, spec.partition("(")[0]} & set(reasons):
        pytest.skip(reasons.get(spec) or reasons[spec.partition("(")[0]])
    CHECKS[check](spec, full)


@pytest.mark.parametrize("name", [*list_encodings(), "sums"])
def test_conformance(name):
    run_cases(run_check, checks_of(name, full=False))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*list_encodings(), "sums"])
def test_conformance_at_all_sizes(name):
    run_cases(run_check, checks_of(name, full=True))


def test_every_spec_is_checked_and_exclusions_exist():
    checked = [
        arguments["spec"] for name in [*list_encodings(), "sums"] for _, arguments in checks_of(name, False)
    ]
    assert set(checked) == {*SPECS, *SUMS}
    assert set(EXCLUDED) <= set(CHECKS)
    known = {*SPECS, *SUMS, *(spec.partition("(")[0] for spec in SPECS)}
    assert {spec for specs in EXCLUDED.values() for spec in specs} <= known


@cases("name", list_encodings())
def test_docstrings_have_the_sections_that_users_need(name):
    cls = encoding_class(name)
    text = inspect.getdoc(cls)
    for line in ("Shapes:", "New resolution:", "Cost:", "Invariant to:", "Differs from the reference:"):
        assert line in text, line
    info = encoding_info(name)
    assert info.summary.endswith(".")
    assert info.kinds or name == "none"
    assert info.paper.partition("https://")[2] or "there is none; it is ours" in text or name == "none"
    assert 1990 < info.year < 2100 or name == "none"
    for p in inspect.signature(cls).parameters.values():
        assert p.kind is p.KEYWORD_ONLY
        assert f"    {p.name}: " in text, p.name
        json.dumps(None if p.default is p.empty else p.default)
    for preset, options in cls.presets.items():
        assert f"{name}.{preset}" in text
        build(f"{name}.{preset}")
        assert set(options) <= set(info.options)


@cases("name", list_encodings())
def test_axes(name):
    encoding = build(name)
    for axes in (1, 2, 3):
        grid = Grid((2, 3, 2)[:axes], prefix=1)
        if axes in encoding.ndim:
            assert run(encoding, encoding.prepare(grid.positions())).isfinite().all()
        else:
            with pytest.raises(ShapeError, match=rf"{name} needs .*axis|{name} needs .*axes"):
                run(encoding, encoding.prepare(grid.positions()))


@cases("name", list_encodings())
def test_every_class_has_a_kind(name):
    cls = encoding_class(name)
    assert issubclass(cls, Encoding)
    assert [k for k, base in KINDS.items() if issubclass(cls, base)] == list(encoding_info(name).kinds)
    encoding = build(name)
    assert encoding.parts() == (encoding,)
    assert encoding.extra_repr() == ", ".join(f"{k}={v}" for k, v in encoding.config.items() if k != "name")


@cases(
    ("spec", "facts", "message"),
    [
        ("sincos2d", {"dim": 6}, "dim needs an integer above 0 and divisible by 4, got dim=6"),
        ("sincos2d", {"dim": 0}, "got dim=0"),
        ("sincos2d(temperature=0)", {}, "temperature needs a number above 0, got temperature=0"),
        ("sincos2d(std=-1)", {}, "std needs a number above 0, got std=-1"),
        ("learned", {"grid": (3,)}, r"grid needs a list of 2 integers above 0, got grid=\(3,\)"),
        ("learned", {"grid": (3, 0)}, r"grid needs a list of 2 integers above 0, got grid=\(3, 0\)"),
        ("learned(std=-1)", {}, "std needs a number of 0 or more, got std=-1"),
        ("alibi2d", {"num_heads": 0}, "num_heads needs an integer above 0, got num_heads=0"),
        (
            "alibi2d(slopes=constnt)",
            {},
            "slopes must be one of constant, geometric, alibi, harmonic, radius, learned, got 'constnt'",
        ),
        ("alibi2d(softplus=true)", {}, "softplus=true has no effect with slopes='constant'"),
        ("alibi2d(metric=euclid)", {}, "metric must be one of euclidean"),
        ("alibi2d(normalize=diagonal)", {}, "normalize must be one of max, reference, none, got 'diagonal'"),
        ("alibi2d(normalize=None)", {}, "normalize must be one of .* got None"),
        ("alibi2d(wrap=maybe)", {}, "wrap is true or false, got wrap='maybe'"),
        ("alibi2d(slopes=learned,softplus=1)", {}, "softplus is true or false, got softplus=1"),
        ("alibi2d(reference=[4,4])", {}, r"reference=\[4, 4\] has no effect with normalize='max'"),
        (
            "alibi2d(normalize=reference,reference=[4])",
            {},
            r"reference needs one number for each of 2 axes, got reference=\[4\]",
        ),
        (
            "alibi2d(normalize=reference,reference=[4,0])",
            {},
            r"reference needs a list of integers above 0, got reference=\[4, 0\]",
        ),
        ("alibi2d(normalize=reference,reference=[4,2.5])", {}, r"reference needs a list of integers"),
        ("alibi2d(spacing=2)", {}, "spacing needs a list of numbers above 0, got spacing=2"),
        ("alibi2d(spacing=[1,-1])", {}, r"spacing needs a list of numbers above 0, got spacing=\[1, -1\]"),
        ("alibi2d(layers=3)", {}, "layers needs a list of integers, got layers=3"),
        ("alibi2d(layers=[0.5])", {}, "layers needs a list of integers"),
        ("alibi2d(layers=[0,4])", {}, r"block indices below depth=4, got \[4\]"),
        ("alibi2d(layers=[-1])", {}, r"block indices below depth=4, got \[-1\]"),
        ("alibi2d(jitter=-1)", {}, "jitter needs a number of 0 or more, got jitter=-1"),
        ("alibi2d(jitter=much)", {}, "jitter needs a number of 0 or more, got jitter='much'"),
        ("alibi2d(jitter=true)", {}, "jitter needs a number of 0 or more, got jitter=True"),
        ("alibi2d(steepest=2)", {}, "steepest=2 has no effect with slopes='constant'. Use slopes=harmonic"),
        (
            "alibi2d(radius=[1,2])",
            {},
            r"radius=\[1, 2\] has no effect with slopes='constant'\. Use slopes=radius",
        ),
        (
            "alibi(slopes=radius)",
            {},
            r"slopes=radius needs the radius of the first .* Use radius=\[first,last\]",
        ),
        ("alibi(slopes=radius,radius=[2])", {}, r"one for each of 3 heads, got \[2\]"),
        ("alibi3d(slopes=radius,radius=[1,2,3,4])", {}, r"one for each of 3 heads, got \[1, 2, 3, 4\]"),
        ("alibi2d(slopes=radius,radius=[0,2])", {}, "radius needs a list of numbers above 0"),
        (
            "alibi2d(slopes=radius,radius=[1,2],metric=squared)",
            {},
            "metric linear in the distance, got metric",
        ),
        ("alibi2d(biased_heads=4)", {}, "between 1 and num_heads=3, got 4"),
        ("alibi2d(biased_heads=0)", {}, "biased_heads needs an integer above 0, got biased_heads=0"),
        ("alibi2d(biased_heads=1.5)", {}, "biased_heads needs an integer above 0, got biased_heads=1.5"),
    ],
)
def test_option_errors(spec, facts, message):
    with pytest.raises(OptionError, match=message):
        build(spec, **facts)
