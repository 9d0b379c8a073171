"""CUDA graph capture and training steps, checked without a GPU: the host copies no tensor and reads no value."""

import warnings
from contextlib import contextmanager

import pytest
import timm
import torch

import vispe
from tests.attention.triton.compiled.stand_in_driver import stand_in_gpu
from tests.cases import cases
from tests.hosts.helpers import shake

pytest.importorskip("triton", reason="Triton is not installed")
POSITIONS = vispe.list_encodings(kind="positions")  # need an encoding that reads positions
SHAPE = {"img_size": 16, "patch_size": 4, "embed_dim": 64, "depth": 1, "num_heads": 2, "num_classes": 2}


def vit(spec):
    torch.manual_seed(0)
    model = timm.models.VisionTransformer(dynamic_img_size=True, mlp_ratio=1.0, **SHAPE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return shake(vispe.convert(model, spec)).eval()


@contextmanager
def isolated(capturing=True):
    """Make copies from the host and synchronisations fail; `capturing` mimics torch during graph capture."""

    def refuse(name):
        def refused(*args, **kwargs):
            raise RuntimeError(f"{name} between launches")

        return refused

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
        for name in ("tensor", "as_tensor", "from_numpy"):
            patch.setattr(torch, name, refuse(f"torch.{name}"))
        for name in ("new_tensor", "item", "tolist", "__bool__", "__float__", "__int__", "numpy", "cpu"):
            patch.setattr(torch.Tensor, name, refuse(f"Tensor.{name}"))
        yield


@cases("name", vispe.list_encodings(ndim=2, exclude=POSITIONS))
def test_evaluation_is_captured(name):
    model, x = vit(name), torch.randn(2, 3, 16, 16)
    with torch.no_grad(), stand_in_gpu(90, compiles=False):
        for _ in range(3):
            model(x)
        with isolated():
            model(x)


@cases("name", vispe.list_encodings(ndim=2, exclude=POSITIONS))
def test_training_does_not_wait_for_the_gpu(name):
    model, x = vit(name).train(), torch.randn(2, 3, 16, 16)
    with stand_in_gpu(90, compiles=False):
        for _ in range(2):
            model(x).sum().backward()
        with isolated(capturing=False):
            model(x).sum().backward()
