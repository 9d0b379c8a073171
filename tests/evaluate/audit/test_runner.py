"""The pass of an audit: memory, controls, resumption, several processes, verdicts."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch

from vispe.backbones.distributed import Processes
from vispe.backbones.vision_model import VisionModel
from vispe.errors import InputError, OptionError, ShapeError, UnknownName, UnsupportedHost
from vispe.evaluate.audit.findings import Comparison
from vispe.evaluate.audit.html_report import next_steps
from vispe.evaluate.audit.measures import choose
from vispe.evaluate.audit.runner import audit
from vispe.evaluate.behaviour.rolls import shuffled
from vispe.evaluate.measure.audited_model import AuditedModel
from vispe.evaluate.measure.base import GROUPS, Accumulator, Measure, Outcome
from vispe.evaluate.measure.verdict import judge


@dataclass(frozen=True)
class Slope(Measure):
    """How much the features rise from the left to the right, on average over images."""

    name = "slope"
    family = "features"
    question = "Do features rise?"
    number = "slope"
    misleads = "Pictures may rise themselves."
    needs = frozenset({"maps"})
    controls = ("none", "random")

    def on_features(self, acc, maps):
        w = maps.shape[-1]
        x = torch.linspace(-1, 1, w, dtype=torch.float64)
        acc.note(slope=(maps.double().mean((0, 1)) * x).mean())
        acc.add("mean", maps.double(), groups=True)

    def summarize(self, acc, audited):
        values = acc.column("slope")
        details = {"sum": float(acc.sums["mean"].sum())}
        return Outcome(float(values.mean()), values.tolist(), control={"flat": 0.0}, details=details)


@dataclass(frozen=True)
class Layers(Measure):
    """Attention of the first patch to itself after every layer, and of rotated images."""

    name = "layers"
    family = "attention"
    question = "Does it look at itself?"
    number = "share"
    misleads = "Never."
    needs = frozenset({"attention"})

    def on_layer(self, acc, captured):
        acc.layer(x=captured.x.double().mean())

    def rerun(self, acc, runs):
        rotated = runs.maps("turn", runs.image.flip(-1))
        acc.note(turned=rotated.double().mean(), drawn=torch.rand(1, generator=runs.generator()))

    def summarize(self, acc, audited):
        x = acc.column("x")
        return Outcome(x.mean(), x.mean(1).tolist(), x.mean(0).tolist())


@dataclass(frozen=True)
class Own(Measure):
    """Brings its own images."""

    name = "own"
    family = "behaviour"
    question = "Are its images used?"
    number = "count"
    misleads = "Never."
    items = 6

    def rerun(self, acc, runs):
        acc.note(mean=runs.pooled("mine", torch.full((3, 160, 160), float(runs.number))).mean())

    def summarize(self, acc, audited):
        return Outcome(len(acc.records), acc.column("mean").tolist())


REQUESTED = (Slope(), Layers(), Own())


@pytest.fixture(scope="module")
def audited():
    torch.manual_seed(0)
    return AuditedModel(VisionModel(timm.create_model("test_vit", depth=2).eval()), "test_vit")


@pytest.fixture(scope="module")
def images():
    return torch.randn(7, 3, 160, 160, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def whole(audited, images):
    return audit(audited, images, REQUESTED, controls=("none", "random"))


def test_every_measure_has_its_row_controls_and_layers(whole):
    slope, layers, finding = whole.findings
    assert set(slope.control) == {"flat", "none", "random"}
    assert len(slope.outcome.per_image) == 7
    assert len(layers.outcome.per_layer) == 2
    assert finding.value == 6
    assert len(finding.outcome.per_image) == 6
    assert whole.table()[1][0] == "Do features rise?"
    assert whole.to_dict()["findings"][0]["per_image"] == list(slope.outcome.per_image)


def test_no_image_passes_twice(audited, images):
    """The pass whose attention is looked at gives the features, too."""
    captured = []
    hook = audited.model.patch_embed.register_forward_pre_hook(
        lambda module, args: captured.append(args[0].clone())
    )
    actual = audit(audited, images[:2], REQUESTED[:2], controls=())
    hook.remove()
    assert len(captured) == 4  # each image and its mirror
    assert len({bytes(x.numpy()) for x in captured}) == 4
    expected = [
        float((audited.maps(i[None]).double().mean((0, 1, 2)) * torch.linspace(-1, 1, 10).double()).mean())
        for i in images[:2]
    ]
    assert np.allclose(actual.findings[0].outcome.per_image, expected, rtol=0, atol=1e-12)


class Counted(list):
    """Images that count how often they are read."""

    reads = 0

    def __getitem__(self, number):
        self.reads += 1
        return super().__getitem__(number)


def test_counts_of_image_reads_and_forward_passes(audited, images, monkeypatch):
    sizes = []

    def forward(self, x, original=timm.layers.PatchEmbed.forward):
        sizes.append(len(x))
        return original(self, x)

    monkeypatch.setattr(timm.layers.PatchEmbed, "forward", forward)
    samples = Counted(images[:2])
    audit(audited, samples)
    # own: one pass of the image as it is, 3 rotated and 3 with rotated tokens, 3 rolled and 10 without a strip, 1 mixed
    each = (1 + 6 + 3 + 10 + 1) + 2 + 2  # the controls: as it is, and mixed
    assert sizes == [1] * (2 * each + 6 + 64)  # dummies of the prior, and sides in pairs
    assert samples.reads == 2


def test_the_model_is_unchanged(audited, images):
    before = audited.maps(images[:1])
    audit(audited, images[:1], REQUESTED)
    assert torch.equal(before, audited.maps(images[:1]))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in audited.model.modules())


def test_a_killed_run_resumes_with_equal_results(audited, images, whole, tmp_path, monkeypatch):
    monkeypatch.setattr("vispe.evaluate.audit.checkpoint.SAVE_EVERY", 0.0)
    state, requested = tmp_path / "state", []

    def killed(words, share):
        requested.append(words)
        if len(requested) == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        audit(audited, images, REQUESTED, controls=("none", "random"), state=state, on_progress=killed)
    assert state.exists()
    calls = []
    actual = audit(
        audited,
        images,
        REQUESTED,
        controls=("none", "random"),
        state=state,
        on_progress=lambda words, share: calls.append(words),
    )
    assert actual.to_dict() == whole.to_dict()
    assert len(calls) == 21 + 1 - 8  # eight passes were stored
    # other images, names, weights or processes are another audit, and nothing of them is mixed
    with pytest.raises(InputError, match="another audit"):
        audit(audited, images[:6], REQUESTED, state=state)
    same = {"controls": ("none", "random"), "state": state}
    changed = images.clone()
    changed[1, 0, 0, 0] += 1
    for other_images in (changed, images[[0, 2, 1, 3, 4, 5, 6]]):
        with pytest.raises(InputError, match="another audit"):
            audit(audited, other_images, REQUESTED, **same)
    other = AuditedModel(audited.reinitialized(5).f, audited.title)
    for one, options in (
        (audited, {"names": "abcdefg"}),
        (other, {}),
        (audited, {"processes": Ranks(0, 2)}),
    ):
        with pytest.raises(InputError, match="another audit"):
            audit(one, images, REQUESTED, **same, **options)
    state.write_bytes(state.read_bytes()[:1000])
    with pytest.raises(InputError, match="is damaged"):
        audit(audited, images, REQUESTED, **same)


class Ranks(Processes):
    """Two processes in one: the first one's results wait for the second."""

    def joined(self, part, error=None):
        if error is not None:
            raise error
        parts.append(part)
        return parts


def test_two_processes_equal_one(audited, images, whole):
    parts.clear()
    for rank in range(2):
        actual = audit(audited, images, REQUESTED, controls=("none", "random"), processes=Ranks(rank, 2))
    one, two = (a.to_dict()["findings"] for a in (whole, actual))
    assert one[0].pop("details")["sum"] == pytest.approx(two[0].pop("details")["sum"], rel=1e-12)
    assert one == two


parts: list = []


def test_memory_does_not_grow_with_images(audited, images):
    sizes = []
    for n in (2, 6):
        acc = Accumulator()
        for k in range(n):
            acc.begin(k)
            Slope().on_features(acc, audited.maps(images[k : k + 1])[0])
        sizes.append(sum(t.numel() for t in acc.sums.values()))
    assert sizes[0] == sizes[1] == GROUPS * 64 * 100


def test_groups_hold_the_sums_of_their_images():
    acc = Accumulator()
    for k in range(10):
        acc.begin(k)
        acc.add("x", torch.tensor(float(k)), groups=True)
        acc.add("all", torch.tensor(float(k)))
    assert acc.sums["x"].tolist() == [0.0 + 8, 1.0 + 9, 2, 3, 4, 5, 6, 7]
    assert acc.sums["all"] == 45


def test_shuffled_patches_are_a_permutation():
    image = torch.randn(3, 8, 13)
    mixed = shuffled(image, 4, torch.Generator().manual_seed(3))

    def to_patches(x):
        patches = x[:, :8, :12].unfold(1, 4, 4).unfold(2, 4, 4).permute(1, 2, 0, 3, 4).reshape(6, -1)
        return sorted(map(tuple, patches.tolist()))

    assert to_patches(mixed) == to_patches(image)
    assert not torch.equal(mixed, image)
    assert torch.equal(mixed[:, :, 12:], image[:, :, 12:])


@pytest.mark.parametrize(
    ("values", "control", "verdict"),
    [
        ([0.5, 0.6, 0.5, 0.6, 0.5], 0.0, "yes"),
        ([0.5, 0.6, 0.5, 0.6, 0.5], 0.55, "no"),
        ([0.0, 1.0, 0.0, 1.0, 0.0], 0.0, "not decided"),
        ([0.9, 0.9], 0.0, "not decided"),
    ],
)
def test_a_verdict_needs_an_interval_beyond_the_limit(values, control, verdict):
    assert judge(0.1, Outcome(np.mean(values), values, control={"c": control}), {}).verdict == verdict


def test_without_any_control_nothing_is_decided():
    verdict = judge(0.1, Outcome(0.9, [0.9] * 6), {})
    assert verdict.verdict == "not decided"
    assert verdict.margin is None
    assert verdict.interval == pytest.approx((0.9, 0.9))


def test_controls_of_the_same_images_are_compared_in_pairs():
    noise = np.random.default_rng(0).normal(size=30) * 3
    finding, control = Outcome(np.mean(noise) + 1, noise + 1), Outcome(np.mean(noise), noise)
    verdict = judge(0.1, finding, {"random": control})
    assert verdict.verdict == "yes"
    assert verdict.margin == pytest.approx((1.0, 1.0))
    assert verdict.interval[1] - verdict.interval[0] > 1


def test_two_models_are_compared_in_pairs(audited, images, whole):
    other_audit = audit(audited.reinitialized(3), images, REQUESTED, controls=("none",))
    pair = Comparison(whole, other_audit)
    actual = pair.to_dict()["differences"]["layers"]
    mean = other_audit.findings[1].value - whole.findings[1].value
    assert actual["difference"] == pytest.approx(mean)
    assert actual["interval"][0] < mean < actual["interval"][1]
    with pytest.raises(ShapeError, match="same images"):
        Comparison(whole, audit(audited, images[:2], REQUESTED, controls=()))


def test_unsupported_measures_are_listed_with_the_reason(images):
    f = AuditedModel(lambda x: torch.nn.functional.avg_pool2d(x, 16), "averages", patch_size=16)
    actual = audit(f, images[:2], (Slope(), Layers()))
    assert [g.name for g in actual.findings] == ["slope"]
    assert "not measured: it is a function of images" in actual.table()[-1][3]
    assert "random" in actual.missing
    assert "Control 'random' was not run" in actual.notes[0]


class Picky(Slope):
    """Refuses random weights."""

    def summarize(self, acc, audited):
        if "random" in audited.title:
            raise UnsupportedHost("it does not apply to random weights")
        return super().summarize(acc, audited)


def test_a_failing_control_is_named_and_the_audit_continues(audited, images):
    actual = audit(audited, images[:2], (Picky(),), controls=("random",))
    assert set(actual.findings[0].control) == {"flat"}
    assert actual.missing == {"random of slope": "it does not apply to random weights"}


def test_weights_that_are_not_reinitialised_are_named(audited, images, monkeypatch):
    reinitialized = audited.reinitialized(1)
    reinitialized.unchanged = ("head.weight",)
    monkeypatch.setattr(audited, "reinitialized", lambda seed: reinitialized)
    actual = audit(audited, images[:1], (Slope(),), controls=("random",))
    assert "1 parameter, such as head.weight" in actual.notes[0]


def test_errors():
    with pytest.raises(UnknownName, match="unknown measure or family, got 'prove'"):
        choose(["prove"])
    f = AuditedModel(lambda x: x, "identity", patch_size=1)
    with pytest.raises(OptionError, match="unknown control, got 'nothing'"):
        audit(f, torch.zeros(1, 3, 4, 4), (Slope(),), controls=("nothing",))
    with pytest.raises(ShapeError, match="no images, got an empty sequence"):
        audit(f, [], (Slope(),))
    with pytest.raises(ShapeError, match="for image 2 after"):
        audit(f, [torch.zeros(3, 4, 4), torch.zeros(3, 4, 8)], (Slope(),))
    with pytest.raises(UnsupportedHost, match="cannot be reinitialised"):
        f.reinitialized()


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ((), []),
        (("pattern", "turn"), ["--method poses, a mean", "equivariant under the eight poses"]),
        (("heads",), ["--method registers"]),
    ],
)
def test_the_page_names_the_cheapest_remedy_of_each_effect(names, words):
    kinds = [
        SimpleNamespace(name=n, verdict="yes" if n in names else "no") for n in ("pattern", "turn", "heads")
    ]
    *steps, commands = next_steps(SimpleNamespace(findings=kinds))
    assert len(steps) == len(words)
    assert all(word in step for word, step in zip(words, steps, strict=True))
    assert commands.startswith("vispe probe")
