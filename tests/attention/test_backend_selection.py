"""Backend selected for a call, a context or a process: precedence, and effect in all layers and hosts."""

import asyncio
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import timm
import torch
import transformers

import vispe
from tests.cases import cases
from tests.hosts.open_clip import common as open_clip_common
from vispe import Grid, attention, explain, use_backend
from vispe.attention import DistanceBias, backend_selection
from vispe.attention.automatic_backend import BACKENDS
from vispe.cli.main import main
from vispe.errors import BackendUnavailable, UnknownName
from vispe.hosts.attention_paths import STOCK, attention_paths

POS = Grid((3, 4), prefix=1).positions()
BIAS = DistanceBias((0.5, 0.2, 0.1), POS)


def tensors():
    return [torch.randn(2, 3, POS.tokens, 8) for _ in range(3)]


def selected_backend(**arguments):
    return explain(*tensors(), **{"bias": BIAS} | arguments).backend


@pytest.fixture
def environment(monkeypatch):
    return lambda value: monkeypatch.setattr(backend_selection, "_ENVIRONMENT", value)


def test_precedence_of_call_context_and_environment(environment):
    assert selected_backend() == "sdpa"
    environment("reference")
    assert selected_backend() == "reference"
    assert selected_backend(backend="sdpa") == "sdpa"
    with use_backend("sdpa"):
        assert selected_backend() == "sdpa"
        assert selected_backend(backend="reference") == "reference"
        with use_backend("auto"):
            assert explain(*tensors(), bias=BIAS).reason == "one dense mask, cached with its positions"
        assert selected_backend() == "sdpa"
    assert selected_backend() == "reference"


def test_a_context_ends_after_an_error():
    with pytest.raises(KeyError), use_backend("reference"):
        raise KeyError
    assert selected_backend() == "sdpa"


def test_explain_reports_the_source_of_the_selection(environment):
    environment("reference")
    caught = explain(*tensors(), bias=BIAS)
    assert caught.reason == "selected by VISPE_BACKEND"
    assert caught.unsupported["sdpa"] == "another backend is selected"
    with use_backend("sdpa"):
        assert explain(*tensors(), bias=BIAS).reason == "selected by vispe.use_backend"
        assert explain(*tensors(), backend="reference").reason == "selected by name"


def test_invalid_names_are_refused_immediately(environment):
    with pytest.raises(UnknownName, match=r"Unknown backend 'sdap'. Did you mean 'sdpa'"):
        use_backend("sdap")
    with pytest.raises(UnknownName, match="Unknown backend None"):
        use_backend(None)
    environment("sdap")
    with pytest.raises(
        UnknownName,
        match=r"VISPE_BACKEND='sdap' is not the name of a backend. Did you mean 'sdpa'.* unset it",
    ):
        attention(*tensors(), bias=BIAS)
    with use_backend("auto"):
        assert selected_backend() == "sdpa"


def test_a_named_backend_that_does_not_support_a_call_is_an_error(environment):
    with (
        use_backend("lowrank"),
        pytest.raises(
            BackendUnavailable,
            match=r"'lowrank', selected by vispe.use_backend, does not support this call: only squared",
        ),
    ):
        attention(*tensors(), bias=BIAS)
    environment("triton")
    for function in (attention, explain):
        with pytest.raises(
            BackendUnavailable, match=r"'triton', selected by VISPE_BACKEND, does not support this call:"
        ):
            function(*tensors(), bias=BIAS)


def test_the_named_backend_runs_despite_a_cached_mask(monkeypatch):
    q, k, v = tensors()
    attention(q, k, v, bias=BIAS)  # its mask is stored from here on
    ran = []
    unsupported_reason, run = BACKENDS["reference"]
    monkeypatch.setitem(
        BACKENDS, "reference", (unsupported_reason, lambda call: ran.append(call) or run(call))
    )
    with use_backend("reference"):
        attention(q, k, v, bias=BIAS)
    assert len(ran) == 1


def test_threads_and_tasks_have_separate_selections():
    with use_backend("reference"), ThreadPoolExecutor(1) as pool:
        assert selected_backend() == "reference"
        assert pool.submit(selected_backend).result() == "sdpa"

    async def work(name, others):
        with use_backend(name):
            others.append(name)
            while len(others) < 2:  # both are inside of their contexts from here on
                await asyncio.sleep(0)
            first = selected_backend()
            await asyncio.sleep(0)
            return first, selected_backend()

    async def both():
        begun = []
        return await asyncio.gather(work("reference", begun), work("sdpa", begun))

    assert asyncio.run(both()) == [("reference", "reference"), ("sdpa", "sdpa")]


# models


@pytest.fixture(
    params=[True, pytest.param(False, marks=pytest.mark.slow)],
    ids=["guard on the context", "guard on the thread"],
)
def readable(request, monkeypatch):
    if request.param and not backend_selection._CONTEXTVAR_READABLE:
        pytest.skip("this version of torch cannot compile a ContextVar")
    torch._dynamo.reset()
    monkeypatch.setattr(backend_selection, "_CONTEXTVAR_READABLE", request.param)
    yield
    torch._dynamo.reset()


def kinds(graphs):
    """Return by what each graph computes attention."""
    names = [{str(node.target) for node in graph.graph.nodes} for graph in graphs]
    return ["sdpa" if any("scaled_dot_product" in n for n in result) else "reference" for result in names]


@pytest.mark.parametrize("name", ["alibi2d", pytest.param("rope_axial", marks=pytest.mark.slow)])
def test_compiled_models_follow_each_change(readable, environment, name):
    model = timm.create_model("test_vit", img_size=32, pos_embed=name).eval()
    graphs, x = [], torch.randn(1, 3, 32, 32)

    def recorded(graph, inputs):
        graphs.append(graph)
        return graph.forward

    fast = torch.compile(model, backend=recorded, fullgraph=True)
    with torch.no_grad():
        expected = model(x)
        out = [fast(x)]
        with use_backend("reference"):
            out.append(fast(x))
            with use_backend("sdpa"):
                out.append(fast(x))
        environment("reference")
        out.append(fast(x))
        count = len(graphs)
        environment("")
        out.append(fast(x))  # a graph that was compiled before
    assert kinds(graphs[:2]) == ["sdpa", "reference"]
    assert kinds(graphs[-1:]) == ["reference"]
    assert len(graphs) == count
    for actual in out:
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_unsupported_backends_are_refused_in_compiled_models(readable):
    model = torch.compile(
        timm.create_model("test_vit", img_size=32, pos_embed="alibi2d").eval(), backend="eager"
    )
    x = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        model(x)
        with (
            use_backend("lowrank"),
            pytest.raises(Exception, match="does not support this call: only squared"),
        ):
            model(x)


@cases("name", ["alibi2d", "alibi2d(slopes=learned)", "rope_axial"])
def test_converted_models_follow_the_selection(name):
    model = timm.create_model("test_vit", img_size=32, pos_embed=name).eval()
    x = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        expected = model(x)
        for backend in ("reference", "sdpa"):
            with use_backend(backend):
                paths = attention_paths(model, x)
                torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-5)
            caught = {(path.backend, path.reason) for path in paths}
            if (name, backend) == ("alibi2d", "sdpa"):
                assert {path.backend for path in paths} == {STOCK}  # one mask, and SDPA is what timm runs
            else:
                assert caught == {(backend, "selected by vispe.use_backend")}


def test_towers_of_open_clip_and_transformers_follow_the_selection():
    config = transformers.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=24,
        patch_size=8,
    )
    towers = {
        "open_clip": (open_clip_common.tiny_tower(), torch.randn(1, 3, 24, 40)),
        "transformers": (transformers.CLIPVisionModel(config).eval(), torch.randn(1, 3, 24, 24)),
    }
    for name, (tower, x) in towers.items():
        vispe.convert(tower, "alibi2d(slopes=learned)")
        with torch.no_grad(), use_backend("reference"):
            assert {path.backend for path in attention_paths(tower, x)} == {"reference"}, name
        with torch.no_grad(), use_backend("lowrank"), pytest.raises(BackendUnavailable, match="only squared"):
            tower(x)


@cases("side", [96, 544])
@cases(
    "name",
    [
        "alibi2d",
        "lookhere",
        "alibi2d(slopes=learned)",
        "rpb",
        "rope_axial(temperature=1000)",
        "irpe",
        "fox",
        "sincos2d",
    ],
)
def test_describe_reports_masks_of_stock_attention(name, side):
    """From 1,024 tokens on, and for other encodings, layers call vispe's attention."""
    model = timm.create_model("test_vit", img_size=side, pos_embed=name).eval()
    (path, *_) = attention_paths(model, torch.randn(1, 3, side, side))
    is_mask = path.backend == STOCK and "dense mask" in path.reason
    assert ("dense mask of the model's own attention" in vispe.describe(model)) == is_mask
    if name == "alibi2d":
        assert is_mask == (side == 96)
        with use_backend("reference"):
            assert "dense mask" not in vispe.describe(model)


def test_models_without_fused_attention_report_plain_products():
    model = timm.create_model("test_vit", img_size=32, pos_embed="rope_axial").eval()
    for block in model.blocks:
        block.attn.fused_attn = False
    with torch.no_grad(), use_backend("sdpa"):
        (path, *rest) = attention_paths(model, torch.randn(1, 3, 32, 32))
    assert (path.backend, path.reason) == ("reference", "fused attention of this layer is switched off")
    assert {other.backend for other in rest} == {"reference"}


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_use_the_backend_of_the_forward_pass(monkeypatch, reentrant):
    model = timm.create_model("test_vit", img_size=32, pos_embed="alibi2d(slopes=learned)")
    model.set_grad_checkpointing(True)
    monkeypatch.setattr("timm.models._manipulate.use_reentrant_ckpt", lambda: reentrant)
    ran = []
    for name, (unsupported_reason, run) in list(BACKENDS.items()):
        counted = lambda call, name=name, run=run: ran.append(name) or run(call)  # noqa: E731
        monkeypatch.setitem(BACKENDS, name, (unsupported_reason, counted))
    with use_backend("reference"):
        out = model(torch.randn(1, 3, 32, 32, requires_grad=True))
    out.sum().backward()
    assert ran == ["reference"] * 2 * len(model.blocks)


def test_a_backend_of_the_layer_has_precedence():
    x = torch.randn(1, 6, 16)
    for built, expected in (("auto", "reference"), ("sdpa", "sdpa")):
        layer = vispe.Attention(16, 2, "alibi2d", backend=built)
        actual = []

        def recorded(*tensors, actual=actual, **arguments):
            actual.append(explain(*tensors, **arguments).backend)
            return attention(*tensors, **arguments)

        with pytest.MonkeyPatch.context() as patch, use_backend("reference"):
            patch.setattr(vispe.encodings.attention_layer, "attention", recorded)
            layer(x, (2, 3))
        assert actual == [expected]


# the environment, read once when vispe is imported


def process(value, *words):
    done = subprocess.run(
        [sys.executable, *words], env=os.environ | {"VISPE_BACKEND": value}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_environment_variable():
    program = (
        "import os, torch, vispe; q = torch.zeros(1, 1, 4, 8); os.environ['VISPE_BACKEND'] = 'sdpa'; "
        "print(vispe.explain(q, q, q))"
    )
    code, out, _ = process("reference", "-c", program)
    assert (code, out.splitlines()[0]) == (0, "reference: selected by VISPE_BACKEND")
    code, out, _ = process("", "-c", program)
    assert out.splitlines()[0] == "sdpa: there is no bias"
    code, out, err = process(
        "sdap", "-m", "vispe", "doctor", "test_vit", "--encoding", "alibi2d", "--device", "cpu"
    )
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "VISPE_BACKEND='sdap' is not the name of a backend. Did you mean 'sdpa'" in err


def test_doctor_reports_the_selection_and_its_source(capsys, environment):
    words = ["doctor", "test_vit", "--encoding", "rope_axial", "--device", "cpu", "--img-size", "32"]
    environment("reference")
    assert main(words) == 0
    assert "    reference: selected by VISPE_BACKEND\n" in capsys.readouterr().out
    environment("lowrank")
    assert main(["doctor", "test_vit", "--encoding", "alibi2d", "--device", "cpu", "--img-size", "32"]) == 2
    assert "'lowrank', selected by VISPE_BACKEND, does not support this call" in capsys.readouterr().err


@pytest.mark.slow
def test_doctor_of_flex_attention_in_half_precision(environment):
    environment("flex")
    words = ["doctor", "test_vit", "--encoding", "rope_axial", "--device", "cpu", "--img-size", "32"]
    assert main([*words, "--dtype", "bfloat16"]) == 0


@pytest.mark.slow
def test_doctor_without_a_model_reports_the_selection(capsys, environment):
    def caught():
        assert main(["doctor", "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    assert caught()["choice"]["backend"] == "auto (set VISPE_BACKEND to choose another)"
    environment("lowrank")
    report = caught()
    assert report["choice"]["backend"] == "lowrank, chosen by VISPE_BACKEND"
    assert report["choice"]["triton"] in ("Triton kernels do not run on cpu", "Triton is not installed")
    assert (
        "selected by VISPE_BACKEND, does not support this call: only squared"
        in report["attention"]["alibi2d"]
    )


def test_describe_reports_the_selection():
    model = timm.create_model("test_vit", img_size=32, pos_embed="alibi2d")
    assert vispe.describe(model).endswith("; backend auto")
    with use_backend("sdpa"):
        assert vispe.describe(model).endswith("; backend sdpa (chosen by vispe.use_backend)")
        model.blocks[0].attn.fused_attn = False
        assert vispe.describe(model).endswith("; backend reference (fused attention is off)")
