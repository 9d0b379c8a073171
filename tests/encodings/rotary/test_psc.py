"""PSC against its definition, head by head, and alongside a rotation."""

import timm
import torch

import vispe
from vispe import Grid, Positions, attention, create_encoding
from vispe.encodings.compose import transform_of


def random_psc(dim=24, heads=3):
    encoding = create_encoding("psc", dim=dim, num_heads=heads).double()
    with torch.no_grad():
        for matrix in encoding.parameters():
            matrix.normal_()
    return encoding


def slow(x, up, down):
    """Return calibrated tokens (b, h, n, d), one head and token after the other."""
    y = torch.empty_like(x)
    for b, h, n in torch.cartesian_prod(*map(torch.arange, x.shape[:3])):
        inner = up[h].T @ x[b, h, n]
        y[b, h, n] = x[b, h, n] * (1 + torch.tanh(down[h].T @ (inner / (1 + (-inner).exp()))) / 2)
    return y


def test_formula_and_gradients():
    encoding = random_psc()
    for shape in ((3, 5), (4,), (2, 1, 3)):
        pos = Grid(shape, prefix=1).positions()
        q, k = (torch.randn(2, 3, pos.tokens, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
        transform = encoding.transform(pos, 0)
        actual = transform.query(q), transform.key(k)
        expected = slow(q, encoding.q_up, encoding.q_down), slow(k, encoding.k_up, encoding.k_down)
        leaves = [q, k, *encoding.parameters()]
        cotangents = torch.randn_like(q), torch.randn_like(k)
        sides = [torch.autograd.grad(side, leaves, cotangents) for side in (actual, expected)]
        torch.testing.assert_close((actual, sides[0]), (expected, sides[1]))


def test_starts_as_the_identity_and_all_parameters_learn():
    encoding = create_encoding("psc", dim=24, num_heads=3)
    transform = encoding.transform(Grid((2, 3)).positions(), 0)
    q, k = torch.randn(2, 2, 3, 6, 8)
    assert torch.equal(transform.query(q), q)
    assert torch.equal(transform.key(k), k)
    optimiser = torch.optim.SGD(encoding.parameters(), lr=0.1)
    for _ in range(2):
        optimiser.zero_grad()
        transform = encoding.transform(Grid((2, 3)).positions(), 0)
        (transform.query(q) @ transform.key(k).mT).backward(torch.randn(2, 3, 6, 6))
        optimiser.step()
    assert all((p.grad != 0).all() for p in encoding.parameters())  # of V from the second step on


def test_calibrates_before_the_rotation_of_a_sum():
    psc = random_psc(dim=16, heads=2)
    rope = create_encoding("rope_axial", dim=16, num_heads=2)
    pos = Grid((2, 3), prefix=1).positions()
    q, k, v = torch.randn(3, 2, 2, 7, 8, dtype=torch.float64)
    first, second = psc.transform(pos, 0), rope.transform(pos, 0)
    expected = attention(second.query(first.query(q)), second.key(first.key(k)), v, scale=8**-0.5)
    for parts in ((psc, rope), (rope, psc)):
        for backend in ("reference", "sdpa"):
            out = attention(q, k, v, transform=transform_of(parts, pos, 0), backend=backend)
            torch.testing.assert_close(out, expected)


def test_positions_do_not_matter():
    encoding = random_psc()
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    first, second = (encoding.transform(Positions(torch.randn(2, 5, 2)), 0).query(x) for _ in range(2))
    assert torch.equal(first, second)


def test_half_precision_parameters_compute_in_float32():
    encoding = random_psc().float()
    x = torch.randn(2, 3, 5, 8)
    pos = Positions(torch.randn(5, 2))
    expected = encoding.transform(pos, 0).query(x)
    actual = encoding.bfloat16().transform(pos, 0).query(x)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=0.05, atol=0.05)


def test_a_vit():
    model = timm.create_model("test_vit", pos_embed="psc+rope_axial", img_size=(48, 64))
    out = model(torch.randn(2, 3, 48, 64))
    out.backward(torch.randn_like(out))
    plain = vispe.convert(timm.create_model("test_vit", img_size=(48, 64)), "rope_axial")
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if "pos_enc" not in k}, strict=False)
    image = torch.randn(1, 3, 48, 64)
    torch.testing.assert_close(model.eval()(image), plain.eval()(image))  # the identity at the start
