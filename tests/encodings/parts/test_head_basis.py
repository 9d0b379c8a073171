"""Learned bases of heads (basis=head of RoPE encodings) against loops in NumPy, their invariances and gradients."""

import math

import numpy as np
import pytest
import torch
from scipy.linalg import expm

from tests.cases import cases, pairwise
from vispe import Grid, Positions, create_encoding
from vispe.encodings.parts.rotary.head_basis import FLOOR, HeadBasis, fold_rows
from vispe.errors import OptionError

ENCODINGS = ["rope_axial", "rope_mixed", "rope_dinov3", "rope_field"]


def build(name="rope_axial", **options):
    torch.manual_seed(0)
    facts = {"dim": 16, "num_heads": 2, "basis": "head"}
    encoding = create_encoding(name, **{**facts, **options}).double()
    with torch.no_grad():  # away from the identity
        for parameter in encoding.parameters():
            parameter += 0.5 * torch.randn_like(parameter)
    return encoding


def skew(entries, width):
    matrix, index = np.zeros((width, width)), 0
    for i in range(width):
        for j in range(i + 1, width):
            matrix[i, j], matrix[j, i], index = entries[index], -entries[index], index + 1
    return matrix


def matrices(basis, head):
    """Return the matrices of queries and keys of one head."""
    u, v, sigma = (p[head].detach().double().numpy() for p in (basis.u, basis.v, basis.sigma))
    s = np.diag(np.log1p(np.exp(sigma)))
    m = expm(skew(u, len(s))) @ s @ expm(skew(v, len(s))).T
    return m, m if basis.key == "same" else np.linalg.inv(m).T


def rotated(x, angles, layout):
    """Return one vector with its pairs rotated."""
    y = x.copy()
    for pair, angle in enumerate(angles):
        i, j = (2 * pair, 2 * pair + 1) if layout == "interleaved" else (pair, pair + len(angles))
        y[i] = math.cos(angle) * x[i] - math.sin(angle) * x[j]
        y[j] = math.sin(angle) * x[i] + math.cos(angle) * x[j]
    return y


@pairwise
@cases("key", ["inverse_transpose", "same"])
@cases(("name", "options"), [(n, {}) for n in ENCODINGS] + [("rope_axial", {"rotated": 0.5})])
@cases("layout", ["interleaved", "half"])
def test_queries_and_keys_are_multiplied_before_the_rotation(name, options, layout, key):
    encoding = build(name, layout=layout, basis_key=key, **options)
    plain = create_encoding(name, dim=16, num_heads=2, layout=layout, **options).double()
    plain.load_state_dict({k: v for k, v in encoding.state_dict().items() if "head_basis" not in k})
    for shape in ((3, 5), (1, 4)):
        pos = Grid(shape, prefix=2).positions()
        q, k = torch.randn(2, 2, 2, pos.tokens, 8, dtype=torch.float64)
        transform = encoding.transform(pos, 0)
        angles = (plain.angles(pos, 0) * pos.spatial[:, None, :, None]).expand(1, 2, -1, -1)
        for head in range(2):
            for x, actual, m in zip(
                (q, k),
                (transform.query(q), transform.key(k)),
                matrices(encoding.head_basis, head),
                strict=True,
            ):
                for token in range(pos.tokens):
                    product = m @ x[1, head, token].numpy()
                    expected = rotated(product, angles[0, head, token].tolist(), layout)
                    np.testing.assert_allclose(
                        actual[1, head, token].detach().numpy(), expected, rtol=1e-5, atol=1e-5
                    )


@cases("name", ENCODINGS)
def test_the_initial_basis_has_no_effect(name):
    plain, based = (create_encoding(name, dim=16, num_heads=2, basis=basis) for basis in ("none", "head"))
    based.load_state_dict(dict(plain.state_dict()), strict=False)  # without the stored spec
    pos = Grid((3, 4), prefix=1).positions()
    x = torch.randn(2, 2, 13, 8)
    for call in ("query", "key"):
        actual, expected = (getattr(e.transform(pos, 0), call)(x) for e in (based, plain))
        assert torch.equal(actual, expected)
    added = {n for n, _ in based.named_parameters()} - {n for n, _ in plain.named_parameters()}
    assert added == {"head_basis.u", "head_basis.v", "head_basis.sigma"} <= based.no_weight_decay()
    assert sum(p.numel() for p in based.head_basis.parameters()) == 2 * 8 * 8
    assert based.per_layer


@cases("key", ["inverse_transpose", "same"])
def test_scores_depend_on_offsets_and_at_offset_0_not_on_the_basis(key):
    encoding = build(basis_key=key)
    coords = torch.randn(1, 5, 2, dtype=torch.float64) * 4
    q, k = torch.randn(2, 1, 2, 5, 8, dtype=torch.float64)

    def scores(coords):
        transform = encoding.transform(Positions(coords), 0)
        return transform.query(q) @ transform.key(k).mT

    torch.testing.assert_close(scores(coords + 3.5), scores(coords))
    together = scores(coords[:, :1].expand(-1, 5, -1))
    expected = q @ k.mT
    if key == "same":  # q^T V S^2 V^T k
        gram = [torch.from_numpy(m.T @ m) for m in (matrices(encoding.head_basis, h)[0] for h in range(2))]
        expected = q @ torch.stack(gram) @ k.mT
    torch.testing.assert_close(together, expected)


@cases("key", ["inverse_transpose", "same"])
def test_gradients(key):
    basis = HeadBasis(2, 4, key).double()
    names = ("u", "v", "sigma")
    leaves = [(p + torch.randn_like(p)).detach().requires_grad_() for _, p in basis.named_parameters()]

    def out(*values):
        state = dict(zip(names, values, strict=True))
        return torch.func.functional_call(basis, state, (), {}, tie_weights=False)

    basis.forward = basis.matrices
    assert torch.autograd.gradcheck(out, tuple(leaves), fast_mode=True)


def test_generators_that_commute_with_the_rotation_have_no_gradient_at_the_identity():
    encoding = create_encoding("rope_axial", dim=16, num_heads=2, basis="head").double()
    transform = encoding.transform(Grid((3, 4)).positions(), 0)
    q, k = torch.randn(2, 1, 2, 12, 8, dtype=torch.float64)
    scores = transform.query(q) @ transform.key(k).mT
    (scores * torch.randn_like(scores)).sum().backward()
    row, col = torch.triu_indices(8, 8, 1)
    inside_pair = (row // 2 == col // 2).expand(2, -1)
    for name in ("u", "v"):
        gradient = getattr(encoding.head_basis, name).grad
        assert gradient[inside_pair].abs().max() < 1e-9 * gradient.abs().max()
        assert gradient[~inside_pair].abs().min() > 1e-9 * gradient.abs().max()
    assert encoding.head_basis.sigma.grad.all()


def test_rows_of_projections_are_folded_by_head():
    basis = build().head_basis
    weight, bias, x = torch.randn(16, 6), torch.randn(16), torch.randn(5, 6)
    for m in basis.matrices():
        outputs = torch.nn.functional.linear(x, fold_rows(weight, m), fold_rows(bias, m))
        plain = torch.nn.functional.linear(x, weight, bias).unflatten(-1, (2, 8)).double()
        expected = torch.einsum("hij,nhj->nhi", m, plain).flatten(1)
        torch.testing.assert_close(outputs.double(), expected, rtol=1e-5, atol=1e-5)
        assert fold_rows(weight.bfloat16(), m).dtype == torch.bfloat16


def test_small_scales_are_clamped():
    basis = HeadBasis(1, 4, "inverse_transpose")
    with torch.no_grad():
        basis.sigma.fill_(-50.0)
    of_queries, of_keys = basis.matrices()
    torch.testing.assert_close(of_queries[0], FLOOR * torch.eye(4))
    torch.testing.assert_close(of_keys[0], torch.eye(4) / FLOOR)


def test_matrices_are_float32_or_better():
    basis = build().head_basis
    half = HeadBasis(2, 8, "same").bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert half.matrices()[0].dtype == torch.float32
        assert basis.matrices()[0].dtype == torch.float64


def test_grouped_queries_share_the_matrix_of_their_key_head():
    encoding, pos = build(), Grid((2, 3)).positions()
    transform = encoding.transform(pos, 0)
    q, k = torch.randn(1, 6, 6, 8, dtype=torch.float64), torch.randn(1, 2, 6, 8, dtype=torch.float64)
    result = transform.query(q)
    for group in range(3):
        torch.testing.assert_close(result[:, group::3], transform.query(q[:, group::3]))
    assert transform.key(k).shape == k.shape


def test_parameters_that_change_in_eval_mode_change_the_scores():
    encoding, pos = build().eval(), Grid((2, 3)).positions()
    x = torch.randn(1, 2, 6, 8, dtype=torch.float64)
    with torch.no_grad():
        first = encoding.transform(pos, 0).query(x)
        assert torch.equal(first, encoding.transform(pos, 0).query(x))
        encoding.head_basis.u += 0.1
        assert not torch.allclose(first, encoding.transform(pos, 0).query(x))


def test_errors():
    with pytest.raises(
        OptionError, match=r"basis_key='same' has no effect with basis='none'\. Use basis=head\."
    ):
        create_encoding("rope_axial", dim=16, num_heads=2, basis_key="same")
    with pytest.raises(OptionError, match=r"basis must be one of none, head, got 'layer'"):
        build(basis="layer")
