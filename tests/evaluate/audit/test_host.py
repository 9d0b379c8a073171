"""An audit finds its subject as every command does: by a name, from a model, from a segmenter."""

import numpy as np
import pytest
import timm
import torch

from vispe.errors import OptionError, UnsupportedHost
from vispe.evaluate.audit.host import host_of
from vispe.evaluate.subject import Subject, load_subject


def test_subject_and_model_give_the_same_host():
    subject = load_subject("test_vit", weights="random", device="cpu")
    host, image = host_of(subject), torch.rand(1, 3, 160, 160)
    direct = host_of(subject.features.model, "mine")
    assert host.title == subject.title
    assert direct.title == "mine"
    assert host.patch == direct.patch == 16
    assert torch.equal(host.maps(image), direct.maps(image))
    assert host.can == direct.can == {"maps", "pooled", "attention"}


class Bright:
    names = ("bright", "dark")

    def __call__(self, image):
        return np.where(image[0].numpy() > 0.5, 1, 2)


def test_segmenters_give_probabilities_or_labels_one_hot():
    image = torch.rand(2, 3, 6, 8)
    host = host_of(Subject("labels", segmenter=Bright(), names=Bright.names))
    maps = host.maps(image)
    assert maps.shape == (2, 2, 6, 8)
    assert host.patch == 1
    assert torch.equal(maps[:, 0], (image[:, 0] > 0.5).float())
    assert torch.equal(maps.sum(1), torch.ones(2, 6, 8))
    sure = Bright()
    sure.probabilities = lambda image: image[:2]
    assert torch.equal(host_of(Subject("soft", segmenter=sure)).maps(image), image[:, :2])
    assert "attention" not in host.can
    assert host.why["attention"].startswith("it is a function")
    with pytest.raises(UnsupportedHost, match="function of images"):
        host.twin()
    with pytest.raises(OptionError, match="does not say of how many classes"):
        host_of(Subject("labels", segmenter=Bright()))


def test_training_mode_is_refused():
    with pytest.raises(OptionError, match=r"call model.eval\(\)"):
        host_of(timm.create_model("test_vit"))
