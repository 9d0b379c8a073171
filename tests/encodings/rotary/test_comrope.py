"""ComRoPE against matrix exponentials in float64, and equality of its two forms."""

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import cases
from vispe import Attention, Grid, Positions, create_encoding
from vispe.encodings.parts.rotary.skew_symmetric import skew_matrix, skew_upper
from vispe.errors import OptionError, ShapeError

DIM, HEADS = 32, 2
AP, LD = "comrope_ap", "comrope_ld"
BOTH = cases("name", [AP, LD])


def build(name, **options):
    return create_encoding(name, **{"dim": DIM, "num_heads": HEADS, **options}).double()


def coordinates(cell, shape, normalize):
    """Return the coordinates of one cell."""
    if normalize == "none":
        return [float(i) for i in cell]
    sides = shape if normalize == "axis" else [max(shape[-2:])] * len(shape)
    return [(i + 0.5) / n for i, n in zip(cell, sides, strict=True)]


def oracle(encoding, positions):
    """Return full rotation matrices (n, h, d, d) for coordinates (n, axes), entry by entry."""
    heads, _, blocks, _ = encoding.skew.shape
    s, head = encoding.width, DIM // HEADS
    out = torch.eye(head, dtype=torch.float64).repeat(len(positions), HEADS, 1, 1)
    for n, x in enumerate(positions):
        for h, j in itertools.product(range(HEADS), range(blocks)):
            generator = torch.zeros(s, s, dtype=torch.float64)
            entries = iter(encoding.skew[h if heads > 1 else 0, 0, j].tolist())
            for a, b in itertools.combinations(range(s), 2):
                generator[a, b] = next(entries)
                generator[b, a] = -generator[a, b]
            if encoding.name == LD:
                factor = sum(x[i] * encoding.theta[i, j].item() for i in range(len(x)))
            elif encoding.partition == "interleaved":
                factor = x[j % len(x)]
            else:
                factor = x[j // (blocks // len(x))]
            out[n, h, j * s : j * s + s, j * s : j * s + s] = torch.linalg.matrix_exp(generator * factor)
    return out


CASES = [
    (AP, {}, (3, 4)),
    (AP, {"block": 3, "partition": "contiguous", "normalize": "common"}, (5, 2)),
    (AP, {"block": 2, "share_heads": True, "normalize": "none", "init_std": 0.3}, (1, 3)),
    (AP, {"axes": 3, "block": 4, "cls_position": 0.5}, (2, 1, 3)),
    (LD, {}, (3, 4)),
    (LD, {"block": 5, "normalize": "common", "cls_position": -0.3}, (2, 5)),
    (LD, {"axes": 3, "block": 4, "normalize": "common"}, (3, 2, 2)),
    (LD, {"axes": 1, "block": 2}, (7,)),
]


@cases(("name", "options", "shape"), CASES)
def test_rotations_are_the_exponentials_of_the_definition(name, options, shape):
    encoding = build(name, **options)
    normalize = options.get("normalize", "axis")
    cls = [options.get("cls_position", 0.0)] * len(shape)
    positions = [cls, cls, *(coordinates(c, shape, normalize) for c in itertools.product(*map(range, shape)))]
    expected = oracle(encoding, positions)
    pos = Grid(shape, prefix=2).positions()
    free = pos.replace(coords=pos.coords.clone().requires_grad_())  # the general path, token by token
    x = torch.randn(3, HEADS, pos.tokens, DIM // HEADS, dtype=torch.float64)
    for p in (pos, free):
        transform = encoding.transform(p, 0)
        actual = transform.query(x)
        torch.testing.assert_close(actual, torch.einsum("nhij,bhnj->bhni", expected, x), rtol=1e-5, atol=1e-6)
        assert torch.equal(actual, transform.key(x))
        assert transform.value(x) is x
    blocks = encoding.rotations(pos)
    torch.testing.assert_close(
        blocks @ blocks.mT, torch.eye(encoding.width).double().expand_as(blocks), rtol=0, atol=1e-9
    )


@cases(("name", "options", "shape"), CASES)
def test_the_folded_form_is_the_same_attention(name, options, shape):
    encoding = build(name, **options)
    folded, basis = encoding.fold()
    assert folded.config == {**encoding.config, "form": "folded"}
    eye = torch.eye(DIM // HEADS, dtype=torch.float64).expand_as(basis)
    torch.testing.assert_close(basis @ basis.mT, eye, rtol=0, atol=1e-12)
    layer = Attention(DIM, HEADS, fused_qkv=False).double()
    layer.pos_enc = encoding
    other = copy.deepcopy(layer)
    other.pos_enc = folded
    with torch.no_grad():
        for projection in (other.q_proj, other.k_proj):
            for p in projection.parameters():
                p.copy_(folded.in_basis(p, basis.expand(HEADS, -1, -1)))
    grid = Grid(shape, prefix=1)
    grads = []
    for model in (layer, other):
        x = torch.linspace(-2, 2, 2 * grid.tokens * DIM, dtype=torch.float64).sin().reshape(2, -1, DIM)
        x.requires_grad_()
        coords = grid.positions().coords.double().requires_grad_()
        y = model(x, grid.positions().replace(coords=coords))
        (y * torch.linspace(0, 9, y.numel(), dtype=torch.float64).cos().reshape(y.shape)).sum().backward()
        grads.append((y, x.grad, coords.grad, *([model.pos_enc.theta.grad] if name == LD else [])))
    for one, two in zip(*grads, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-7)


@BOTH
def test_folding_a_start_at_zero_and_repeated_frequencies(name):
    for options in ({"init_std": 0.0}, {"init": "geometric", "base": 1.0}, {"block": 3}):
        encoding = build(name, **options)
        folded, basis = encoding.fold()
        pos = Grid((3, 2), prefix=1).positions()
        q, k = torch.randn(2, 1, HEADS, 7, DIM // HEADS, dtype=torch.float64)
        one, two = encoding.transform(pos, 0), folded.transform(pos, 0)
        plain = one.query(q) @ one.key(k).mT
        qb, kb = (t @ basis.mT for t in (q, k))
        torch.testing.assert_close(two.query(qb) @ two.key(kb).mT, plain, rtol=1e-5, atol=1e-6)
        if options == {"init_std": 0.0}:  # as without encoding
            torch.testing.assert_close(plain, q @ k.mT)


@BOTH
def test_both_forms_start_with_the_same_frequencies(name):
    torch.manual_seed(0)
    many = [
        create_encoding(name, dim=16 * 400, num_heads=400, form=form, init_std=0.7)
        for form in ("matrix", "folded")
    ]
    matrices = skew_matrix(many[0].skew[:, 0], many[0].width)
    frequencies = torch.linalg.eigvalsh(1j * matrices)[..., -(many[0].width // 2) :]
    torch.testing.assert_close(frequencies.mean((0, 1)), many[1].rate.mean((0, 1)), rtol=0.1, atol=0)
    torch.testing.assert_close(frequencies.std((0, 1)), many[1].rate.std((0, 1)), rtol=0.2, atol=0)
    geometric = [
        create_encoding(name, dim=32, num_heads=2, form=form, init="geometric", base=0.5)
        for form in ("matrix", "folded")
    ]
    rates = torch.linalg.eigvalsh(1j * skew_matrix(geometric[0].skew[:, 0], geometric[0].width))
    half = geometric[0].width // 2
    torch.testing.assert_close(
        rates[..., half:].sort(-1).values, geometric[1].rate.expand(2, -1, -1).sort(-1).values
    )


def test_rope_preset_is_axial_rope():
    encoding = create_encoding("comrope_ap.rope", dim=16, num_heads=2, base=0.1, normalize="none")
    rotated = encoding.transform(Grid((3, 4)).positions(), 0).query(torch.ones(1, 2, 12, 8))
    for token, (y, x) in enumerate(itertools.product(range(3), range(4))):
        angle = torch.tensor([y, 0.1 * y, x, 0.1 * x])
        expected = torch.stack([angle.cos() - angle.sin(), angle.cos() + angle.sin()], -1).flatten()
        torch.testing.assert_close(rotated[0, :, token], expected.expand(2, -1), rtol=1e-5, atol=1e-5)


sides = st.integers(1, 6)


@BOTH
@pytest.mark.parametrize("form", ["matrix", "folded"])
@given(h=sides, w=sides, down=st.floats(-2, 2), right=st.floats(-2, 2))
@settings(max_examples=12, deadline=None, derandomize=True)
def test_scores_depend_on_offsets_only(name, form, h, w, down, right):
    encoding = build(name, form=form, normalize="none", init_std=0.5)
    coords = Grid((h, w)).positions().coords.double()
    q, k = torch.randn(2, 1, HEADS, h * w, DIM // HEADS, dtype=torch.float64)
    scores = []
    for shift in (torch.zeros(2), torch.tensor([down, right])):
        transform = encoding.transform(Positions(coords + shift), 0)
        scores.append(transform.query(q) @ transform.key(k).mT)
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(transform.query(q).norm(dim=-1), q.norm(dim=-1))


@BOTH
@cases("form", ["matrix", "folded"])
def test_dropped_tokens(name, form):
    encoding = build(name, form=form, jitter=1.0, cls_position=0.5).train()
    pos = encoding.prepare(Grid((3, 4), prefix=2).positions())
    x = torch.randn(3, HEADS, pos.tokens, DIM // HEADS, dtype=torch.float64)
    full = encoding.transform(pos, 0).query(x)
    keep = torch.stack([torch.cat([torch.arange(2), 2 + torch.randperm(12)[:5]]) for _ in range(3)])
    subset = encoding.transform(pos.gather(keep), 0)
    take = keep[:, None, :, None].expand(-1, HEADS, -1, x.shape[-1])
    torch.testing.assert_close(subset.query(x.gather(2, take)), full.gather(2, take))
    encoding.eval()
    prepared = encoding.prepare(Grid((3, 4), prefix=2).positions())
    full = encoding.transform(prepared, 0).query(x)
    torch.testing.assert_close(
        encoding.transform(prepared.gather(keep), 0).query(x.gather(2, take)),
        full.gather(2, take),
        rtol=1e-6,
        atol=1e-6,
    )


@BOTH
@cases("form", ["matrix", "folded"])
@cases("shape", [(3, 2), (1, 4)])
def test_gradients(name, form, shape):
    encoding = build(name, dim=12, num_heads=2, block=3, form=form)
    grid = Grid(shape, prefix=1)
    coords = grid.positions().coords.double().requires_grad_()
    q = torch.randn(1, 2, grid.tokens, 6, dtype=torch.float64, requires_grad=True)
    names, values = zip(
        *((n, p.detach().clone().requires_grad_()) for n, p in encoding.named_parameters()), strict=True
    )

    def rotated(q, coords, *parameters):
        def call(coords):
            return encoding.transform(coords, 0).query(q)

        pos = grid.positions().replace(coords=coords)
        holder = dict(zip(names, parameters, strict=True))
        originals = dict(encoding.named_parameters())
        for n in names:
            delattr(encoding, n)
            setattr(encoding, n, holder[n])
        try:
            return call(pos)
        finally:
            for n in names:
                delattr(encoding, n)
                encoding.register_parameter(n, originals[n])

    assert torch.autograd.gradcheck(rotated, (q, coords, *values), fast_mode=True)


@BOTH
def test_gradients_on_the_grid_are_those_of_every_token(name):
    encoding = build(name)
    pos = Grid((3, 5), prefix=1).positions()
    free = Positions(pos.coords, pos.spatial, pos.extent, cell=pos.cell)
    x = torch.randn(2, HEADS, pos.tokens, DIM // HEADS, dtype=torch.float64)
    weight = torch.randn_like(x)
    grads = []
    for positions in (pos, free):
        encoding.zero_grad()
        (encoding.transform(positions, 0).query(x) * weight).sum().backward()
        grads.append([p.grad.clone() for p in encoding.parameters()])
    for one, two in zip(*grads, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


@BOTH
def test_jitter_is_below_half_a_cell_and_not_on_time(name):
    for shape in ((4, 6), (2, 3, 5)):
        encoding = build(name, axes=len(shape), block=2, jitter=1.0, jitter_offset=0.3, normalize="none")
        pos = Grid(shape, prefix=1).positions()
        without_jitter = encoding.eval().coordinates(encoding.prepare(pos))
        assert torch.equal(without_jitter, pos.coords)
        noise, offset = torch.randn(1, pos.tokens, len(shape)), torch.randn(len(shape))
        arguments = encoding.prepare(pos, draws={"comrope_jitter": noise, "comrope_offset": offset})
        jitter = (0.5 * noise).clamp(-0.5, 0.5)
        if len(shape) == 3:
            jitter[..., 0] = 0
        expected = (pos.coords + jitter + 0.3 * offset) * pos.spatial[..., None]
        torch.testing.assert_close(encoding.coordinates(arguments), expected)
        first = encoding.train().prepare(pos, generator=torch.Generator().manual_seed(1))
        second = encoding.prepare(pos, generator=torch.Generator().manual_seed(1))
        assert torch.equal(encoding.coordinates(first), encoding.coordinates(second))
        assert encoding.prepare(first) is first
        with pytest.raises(ShapeError, match=r"needs a draw of comrope_jitter of shape \(1, .*got \(2, 2\)"):
            encoding.prepare(pos, draws={"comrope_jitter": torch.zeros(2, 2)})
        with pytest.raises(ShapeError, match="needs a draw of comrope_offset of shape"):
            encoding.prepare(pos, draws={"comrope_offset": torch.zeros(4)})


@BOTH
def test_changed_coordinates_of_a_grid_are_used(name):
    encoding = build(name, normalize="none")
    pos = Grid((3, 4)).positions()
    warped = pos.replace(coords=pos.coords + torch.rand_like(pos.coords))
    free = Positions(warped.coords)
    torch.testing.assert_close(encoding.rotations(warped), encoding.rotations(free))


@BOTH
def test_checkpoints_of_the_reference_load(name):
    encoding = build(name, block=4)
    freqs = torch.randn(HEADS, 1, 4, 4, 4, dtype=torch.float64)
    state = {"attn.freqs": freqs}
    if name == LD:
        state["attn.multiplier"] = torch.randn(1, 2, 4, 1, 1, dtype=torch.float64)
    theta = state.get("attn.multiplier")
    encoding.rename_checkpoint_keys(state, "attn.", "")
    encoding.load_state_dict(state)
    skew = freqs - freqs.mT
    expected = (
        skew * theta if name == LD else skew * torch.eye(2)[:, torch.arange(4) % 2][..., None, None].double()
    )
    torch.testing.assert_close(encoding.generators(), expected)
    assert torch.equal(skew_matrix(skew_upper(freqs), 4), freqs - freqs.mT)


@cases("spec", [f"{n}({f})" for n in (AP, LD) for f in ("form=matrix", "form=folded")])
def test_axes_and_forms_are_validated(spec):
    encoding = create_encoding(spec, dim=DIM, num_heads=HEADS)
    with pytest.raises(ShapeError, match=r"needs 2-axis positions, got 3 axes .* Use comrope_..\(axes=3\)"):
        encoding.transform(Grid((2, 2, 2)).positions(), 0)
    if "folded" in spec:
        with pytest.raises(OptionError, match=r"has no matrices with form=folded.* Use form=matrix"):
            encoding.rotations(Grid((2, 2)).positions())
        with pytest.raises(OptionError, match="can only be folded with form=matrix"):
            encoding.fold()


@cases(
    ("spec", "message"),
    [
        ("comrope_ap(axes=4)", "axes needs an integer from 1 to 3, got axes=4"),
        (
            "comrope_ap(block=9)",
            r"needs a block of 2 to 8 channels for 16 channels per head and 2 parts, got block=9",
        ),
        ("comrope_ld(block=1)", "block needs an integer of 2 or more, got block=1"),
        ("comrope_ld(block=2.5)", r"got block=2\.5"),
        ("comrope_ld(form=fold)", "form must be one of matrix, folded, got 'fold'"),
        ("comrope_ap(partition=mixed)", "partition must be one of interleaved, contiguous, got 'mixed'"),
        ("comrope_ap(share_heads=1)", "share_heads is true or false, got share_heads=1"),
        ("comrope_ld(normalize=max)", "normalize must be one of axis, common, none, got 'max'"),
        ("comrope_ld(init=zero)", "init must be one of normal, geometric, got 'zero'"),
        ("comrope_ld(init_std=-1)", "init_std needs a number of 0 or more, got init_std=-1"),
        ("comrope_ld(jitter=much)", "jitter needs a number of 0 or more, got jitter='much'"),
        ("comrope_ld(jitter_offset=-1)", "jitter_offset needs a number of 0 or more, got jitter_offset=-1"),
        ("comrope_ld(cls_position=left)", "cls_position needs a finite number, got cls_position='left'"),
        ("comrope_ld(base=0.5)", "base=0.5 has no effect with init='normal'. Use init=geometric"),
        ("comrope_ld(init=geometric,base=0)", "base needs a number above 0, got base=0"),
    ],
)
def test_option_errors(spec, message):
    with pytest.raises(OptionError, match=message):
        create_encoding(spec, dim=DIM, num_heads=HEADS)


def test_the_width_must_fit():
    with pytest.raises(
        OptionError, match="comrope_ld needs dim to be a multiple of num_heads, got dim=10, num_heads=3"
    ):
        create_encoding(LD, dim=10, num_heads=3)
    with pytest.raises(OptionError, match="needs a block of 2 to 1 channels"):
        create_encoding(AP, dim=6, num_heads=3)
