"""Models with unregistered parameters: replicas of `torch.nn.DataParallel`, and modules inside FSDP."""

import copy

import pytest
import timm
import torch
from torch import nn

import vispe
from tests.cases import cases
from tests.hosts.transformers.vision import test_dense_prediction, vision_models
from tests.products import partly
from vispe.utils.parameters import parameters_of

MOVED = vispe.list_encodings(kind="positions")  # these need an encoding that reads positions
TABLES = [name for name in test_dense_prediction.TOWERS if "Backbone" not in name and "Sapiens2" not in name]


def replica(module):
    """Return a replica on one device, built like those of `torch.nn.parallel.replicate`."""
    result = module._replicate_for_data_parallel()
    result._former_parameters = {}
    for name, part in module._modules.items():
        setattr(result, name, None if part is None else replica(part))
    for name, parameter in module._parameters.items():
        copied = None if parameter is None else parameter * 1.0
        setattr(result, name, copied)
        if copied is not None:
            result._former_parameters[name] = copied
    return result


def shifted(model, seed):
    """Add noise to all parameters, like a training step."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def vit():
    shape = {"img_size": 16, "patch_size": 4, "embed_dim": 48, "depth": 1, "num_heads": 2, "mlp_ratio": 1.0}
    return timm.models.VisionTransformer(num_classes=2, dynamic_img_size=True, **shape)


@partly(8)
@cases("name", vispe.list_encodings(ndim=2, exclude=MOVED))
def test_encodings_of_replicas_have_current_weights(name):
    torch.manual_seed(0)
    model = shifted(vispe.convert(vit(), name), 0).eval()
    x = torch.randn(2, 3, 16, 16)
    for seed in range(2):
        with torch.no_grad():  # masks and tables of a grid are cached from the second call on
            expected = copy.deepcopy(model)(x)
            for _ in range(3 if seed == 0 else 1):
                torch.testing.assert_close(replica(model)(x), expected, rtol=0, atol=1e-5)
        other = copy.deepcopy(model)
        other(x).square().sum().backward()
        replica(model)(x).square().sum().backward()
        for (path, p), q in zip(other.named_parameters(), model.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), path
            if p.grad is not None:
                torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-5)
        model.zero_grad()
        shifted(model, 1 + seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["fourier_learned", "rpb", "irpe", "kerple", "decomposed", "rope_mixed", "seqpe", "alibi2d"]
)
def test_encodings_inside_fsdp_have_current_weights(name):
    torch.manual_seed(0)
    model = shifted(vispe.convert(vit(), name), 0).eval()
    flat, paths = flattened(copy.deepcopy(model))
    x = torch.randn(2, 3, 16, 16)
    for seed in (1, 2):
        shifted(model, seed)
        for part, attribute, path in paths:
            getattr(part, attribute).data.copy_(model.get_parameter(path))
        with torch.no_grad():
            for _ in range(3):
                torch.testing.assert_close(flat(x), model(x), rtol=0, atol=1e-5)


def flattened(model):
    """Return a model with plain tensors as parameters, as in `FullyShardedDataParallel`, and their paths."""
    paths = []
    for prefix, part in model.named_modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None:
                del part._parameters[name]
                setattr(part, name, parameter.detach().clone())
                paths.append((part, name, f"{prefix}.{name}".lstrip(".")))
    return model, paths


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["ViTModel", "DeiTModel", "Dinov2WithRegistersModel", "ViTMAEModel", "PixioModel", *TABLES]
)
def test_replicas_of_vision_models_without_their_table(name):
    source = test_dense_prediction if name in TABLES else vision_models
    model, sample = source.build(name), source.inputs(name)
    vispe.convert(model, "alibi2d(slopes=learned)", keep_abs=False)
    for a, b in zip(
        vision_models.outputs(replica(model), sample), vision_models.outputs(model, sample), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_replicas_of_a_custom_loop():
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = vispe.convert(vit(), "alibi2d(slopes=learned)")

        def forward(self, x):
            x = self.model.patch_embed(x).flatten(1, 2)
            with vispe.positions_for(self.model, (4, 4), prefix=0):
                for block in self.model.blocks:
                    x = block(x)
            return x

    loop, x = Loop().eval(), torch.randn(1, 3, 16, 16)
    assert torch.equal(replica(loop)(x), loop(x))


def test_parameters_of_replicas():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, bias=False))
    for a, b in zip(parameters_of(replica(model)), parameters_of(model), strict=True):
        assert torch.equal(a, b)
        assert a.requires_grad


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_data_parallel():
    model = vispe.convert(vit(), "rpb").cuda().eval()
    x = torch.randn(4, 3, 16, 16, device="cuda")
    torch.testing.assert_close(nn.DataParallel(model)(x), model(x))
