"""Models on a GPU compute what they compute on the CPU: encodings, windows, vision models and VLMs of transformers.

Not collected by default, as it needs a CUDA device:

    python -m pytest -n 8 tests/hosts/check_cuda.py
"""

import copy
import os
import warnings

import pytest
import timm
import torch

import vispe
from tests.hosts.helpers import shake
from vispe.attention import explain
from vispe.errors import VispeError

DEVICE = os.environ.get("VISPE_TEST_DEVICE", "cuda")  # another value tests this file itself
if DEVICE == "cuda" and not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
POSITIONS = vispe.list_encodings(kind="positions")  # need an encoding that reads positions
ENCODINGS = vispe.list_encodings(ndim=2, exclude=POSITIONS)
SHAPE = {
    "img_size": (80, 104),
    "patch_size": 8,
    "embed_dim": 128,
    "depth": 2,
    "num_heads": 2,
    "num_classes": 5,
}
TOLERANCE = 1e-3  # of the largest value; float32 on both sides, whose sums are in another order


@pytest.fixture(autouse=True)
def _exact_convolutions(monkeypatch):
    """Compute patches in float32 instead of TF32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def vit(spec: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model = timm.models.VisionTransformer(dynamic_img_size=True, **SHAPE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return shake(vispe.convert(model, spec)).eval()


def images(*size: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(seed))


def results(model: torch.nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return output and gradients, and the output of the third call in evaluation mode, which reads cached masks."""
    out = model(x)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
    (out * weights).sum().backward()
    computed = {"output": out, **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}
    with torch.no_grad():
        computed["evaluation"] = [model(x) for _ in range(3)][-1]
    return {name: t.detach().cpu() for name, t in computed.items()}


def same(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = TOLERANCE
) -> None:
    assert actual.keys() == expected.keys()
    for name, t in expected.items():
        # gradients of shared offsets are 0 up to rounding
        limit = tolerance * max(t.abs().max().item(), 1e-2)
        error = (actual[name].float() - t.float()).abs().max().item()
        assert error <= limit, f"{name}: {error:.2e} of {t.abs().max().item():.2e}"


@pytest.mark.parametrize("spec", [*ENCODINGS, *(f"{name}+rope_axial" for name in POSITIONS)])
def test_encodings(spec):
    try:
        expected_model = vit(spec)
    except VispeError as error:
        pytest.skip(f"not for this model: {error}")
    model = copy.deepcopy(expected_model).to(DEVICE)
    for size in ((80, 104), (48, 72)):
        expected_model.zero_grad(set_to_none=True)
        model.zero_grad(set_to_none=True)
        x = images(*size)
        same(results(model, x.to(DEVICE)), results(expected_model, x))
    with torch.autocast(DEVICE, torch.bfloat16), torch.no_grad():
        half = model(x.to(DEVICE)).float().cpu()
    with torch.no_grad():
        exact = expected_model(x)
    # rotations of sharp attention amplify rounding; wrong results differ by more than their norm
    assert (half - exact).norm() <= 0.3 * exact.norm()


@pytest.mark.parametrize("spec", ["alibi2d", "rpb", "rope_axial", "irpe", "none"])
@pytest.mark.parametrize(
    "name", ["swin_tiny_patch4_window7_224", "swinv2_cr_tiny_ns_224", "samvit_base_patch16"]
)
def test_windows(name, spec):
    torch.manual_seed(0)
    options = {"img_size": 56, "embed_dim": 32, "window_size": 7}
    options |= (
        {"depths": (2, 2), "num_heads": (2, 2)}
        if "swin" in name
        else {"depth": 2, "num_heads": 2, "patch_size": 4}
    )
    try:
        expected_model = shake(vispe.convert(timm.create_model(name, num_classes=3, **options), spec)).eval()
    except VispeError as error:
        pytest.skip(f"not for this model: {error}")
    model = copy.deepcopy(expected_model).to(DEVICE)
    same(results(model, images(56, 56).to(DEVICE)), results(expected_model, images(56, 56)), 1e-3)


@pytest.mark.parametrize("spec", ["alibi2d", "rpb", "rope_mixed", "irpe"])
def test_compiled_models(spec):
    model = vit(spec).to(DEVICE)
    x = images(80, 104).to(DEVICE)
    expected = results(copy.deepcopy(model), x)
    compiled = results(torch.compile(model, fullgraph=True), x)
    same({n.removeprefix("_orig_mod."): t for n, t in compiled.items()}, expected, 2e-3)


@pytest.mark.parametrize("spec", ["alibi2d", "rpb", "rope_axial", "kerple", "irpe"])
def test_graphs_of_evaluation(spec):
    model, x = vit(spec).to(DEVICE).requires_grad_(False), images(80, 104).to(DEVICE)
    with torch.no_grad():
        expected = [model(x) for _ in range(3)][-1].clone()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            model(x)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            out = model(x)
        out.zero_()
        graph.replay()
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["rpb", "alibi2d"])
def test_the_fused_kernels_are_selected(name):
    """A model of 1,025 tokens in half precision selects fused kernels by default."""
    q, k, v = (torch.randn(2, 3, 1025, 64, device=DEVICE, dtype=torch.float16) for _ in range(3))
    pos = vispe.Grid((32, 32), 1).positions(DEVICE)
    encoding = vispe.create_encoding(name, grid=(32, 32), dim=192, num_heads=3, depth=1)
    bias = encoding.to(DEVICE).bias(pos, 0)
    assert explain(q, k, v, bias=bias).backend == "triton"


def moved(inputs: dict, device: str = DEVICE) -> dict:
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}


def language_families() -> list[str]:
    pytest.importorskip("transformers", reason="vispe[vlm] is not installed")
    from tests.hosts.transformers import more

    return list(more.CLASSES)


@pytest.mark.parametrize("scheme", ["own", "mrope_i", "vrope"])
@pytest.mark.parametrize("family", language_families())
def test_language_models(family, scheme):
    from tests.hosts.transformers import more
    from vispe.hosts.transformers.language.families import family_of

    config = more.stock(family).model.config
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of schemes that are not text-exact
        try:
            expected_model = vispe.convert(
                more.copy_of(family), family_of(config).own(config) if scheme == "own" else scheme
            )
        except VispeError as error:
            pytest.skip(f"not for this model: {error}")
        inputs = more.prompt(family).inputs
        model = copy.deepcopy(expected_model).to(DEVICE)
        with torch.no_grad():
            expected, actual = expected_model(**inputs).logits, model(**moved(inputs)).logits.cpu()
            assert (actual - expected).norm() <= 1e-3 * expected.norm()
            actual, expected = (
                m.generate(**i, max_new_tokens=4, do_sample=False).cpu()
                for m, i in ((model, moved(inputs)), (expected_model, inputs))
            )
    assert torch.equal(actual, expected)


def vision_models() -> list[str]:
    pytest.importorskip("transformers", reason="vispe[vlm] is not installed")
    from tests.hosts.transformers.vision import test_dense_prediction, vision_models

    return [*vision_models.MODELS, *vision_models.BACKBONES, *test_dense_prediction.TOWERS]


@pytest.mark.parametrize("spec", ["alibi2d", "rpb", "rope_axial"])
@pytest.mark.parametrize("name", vision_models())
def test_vision_models_of_transformers(name, spec):
    from tests.hosts.transformers.vision import test_dense_prediction, vision_models
    from tests.hosts.transformers.vision.vision_models import outputs

    if name in test_dense_prediction.TOWERS:
        stock, inputs = test_dense_prediction.build(name), test_dense_prediction.inputs(name)
    else:
        stock = vision_models.build(name)
        inputs = {"pixel_values": images(16, 16).double()}
    try:
        expected_model = vispe.convert(stock, spec).eval()
    except VispeError as error:
        pytest.skip(f"not for this model: {error}")
    expected_model = expected_model.float()
    inputs = {
        k: v.float() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for k, v in inputs.items()
    }
    model = copy.deepcopy(expected_model).to(DEVICE)
    with torch.no_grad():
        torch.manual_seed(0)
        expected = outputs(expected_model, inputs)
        torch.manual_seed(0)
        actual = outputs(model, moved(inputs))
    assert len(expected) == len(actual) > 0
    if "MAE" in name:  # patches are dropped at random, by a generator of the device
        return
    for a, b in zip(actual, expected, strict=True):
        assert (a.cpu() - b).norm() <= 1e-3 * b.norm()
