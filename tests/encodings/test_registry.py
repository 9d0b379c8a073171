"""Specs in every form, names and presets, error messages, and encodings of other packages."""

import sys
import textwrap

import pytest
import torch

import vispe
from tests.cases import cases
from vispe import Biased, Compose, Encoding, create_encoding, encoding_info, list_encodings
from vispe.encodings.bias.decay.alibi2d import Alibi2D
from vispe.encodings.registry import parse_spec, register, spec_error
from vispe.errors import OptionError, UnknownEncoding, UnsupportedCombination


@pytest.fixture
def registry(monkeypatch):
    from vispe.encodings import registry

    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    return registry


@cases(
    ("spec", "options"),
    [
        ("alibi2d", {}),
        ("  alibi2d ( ) ", {}),
        ("alibi2d.geometric", {"slopes": "geometric"}),
        ("alibi2d.local", {"normalize": "none", "wrap": False}),
        ("alibi2d.local(wrap=true)", {"normalize": "none", "wrap": True}),
        ("alibi2d(slopes=learned,wrap=false)", {"slopes": "learned", "wrap": False}),
        ("alibi2d(slopes:learned, wrap:False)", {"slopes": "learned", "wrap": False}),
        ("alibi2d(slopes='learned', jitter=1e-3)", {"slopes": "learned", "jitter": 1e-3}),
        ("alibi2d(reference=null)", {"reference": None}),
        ("alibi2d(spacing=[2, 1.5],layers=(0,2))", {"spacing": [2, 1.5], "layers": [0, 2]}),
        ("alibi2d(spacing:[2,1])", {"spacing": [2, 1]}),
        ('alibi2d(metric="a,b)+(c=d")', {"metric": "a,b)+(c=d"}),
        ("alibi2d(metric=[a, [b, 'c,d'], []])", {"metric": ["a", ["b", "c,d"], []]}),
        ("alibi2d(metric={'a': 1, 'b': [2]})", {"metric": {"a": 1, "b": [2]}}),
        ("alibi2d(metric='x=y:z')", {"metric": "x=y:z"}),
        ("alibi2d(jitter=-1e+2)", {"jitter": -100.0}),
        ({"name": "alibi2d", "wrap": False}, {"wrap": False}),
        ({"name": "alibi2d.local", "wrap": True}, {"normalize": "none", "wrap": True}),
    ],
    ids=str,
)
def test_specs_of_one_encoding(spec, options):
    assert parse_spec(spec) == [{"name": "alibi2d", **options}]
    assert spec_error(spec) is None


def test_sums_in_every_form():
    expected = [{"name": "sincos2d", "std": 0.5}, {"name": "alibi2d", "slopes": "geometric"}]
    inside = create_encoding("alibi2d.geometric", num_heads=4)
    for spec in (
        "sincos2d(std=0.5)+alibi2d.geometric",
        ["sincos2d(std=0.5)", "alibi2d.geometric"],
        ("sincos2d(std=0.5)", {"name": "alibi2d.geometric"}),
        [["sincos2d(std=0.5)"], [inside]],
        expected,
    ):
        assert parse_spec(spec) == expected
    built = create_encoding("sincos2d(std=0.5)+alibi2d.geometric", dim=8, num_heads=4, depth=2)
    assert isinstance(built, Compose)
    assert [e.name for e in built.parts()] == ["sincos2d", "alibi2d"]
    assert built.spec == expected
    assert create_encoding(built.spec, dim=8, num_heads=4, depth=2).config == built.config
    assert parse_spec(built) == expected


def test_instances_in_a_list_are_not_copied():
    learned = create_encoding("alibi2d(slopes=learned)", num_heads=4)
    built = create_encoding([learned, "sincos2d"], dim=8, num_heads=4)
    assert built.parts()[0] is learned
    assert create_encoding([learned], num_heads=4) is learned
    assert create_encoding(learned, num_heads=4, dim=8) is learned
    nested = create_encoding([built, "none"], dim=8, num_heads=4)
    assert [e.name for e in nested.parts()] == ["alibi2d", "sincos2d", "none"]
    with pytest.raises(OptionError, match=r"cannot apply options to an instance, got \['wrap'\]"):
        create_encoding(learned, wrap=False)


@cases(
    ("spec", "message"),
    [
        ("alibi2", r"There is no encoding 'alibi2'\. Did you mean 'alibi2d' or .*Known: alibi, alibi2d,"),
        ("zzz", r"There is no encoding 'zzz'\. Known: alibi, "),
        ("alibi2d.dinsaw", r"There is no preset 'alibi2d\.dinsaw'\. Did you mean 'alibi2d\.dinosaw'"),
        ("alibi2d.", r"There is no preset 'alibi2d\.'"),
        ("none.x", r"There is no preset 'none\.x'\. Known: none\."),
        ({"name": "alibi_2d"}, r"There is no encoding 'alibi_2d'\. Did you mean 'alibi2d'"),
    ],
    ids=str,
)
def test_unknown_names(spec, message):
    with pytest.raises(UnknownEncoding, match=message):
        create_encoding(spec, num_heads=4)
    with pytest.raises(KeyError):
        create_encoding(spec, num_heads=4)
    assert isinstance(spec_error(spec), UnknownEncoding)


@cases(
    ("spec", "message"),
    [
        (
            "alibi2d(slope=learned)",
            r"alibi2d has no option 'slope'\. Did you mean 'slopes'.*It accepts: num_heads, ",
        ),
        ("none(a=1)", r"none has no option 'a'\. It accepts: none\."),
        ({"name": "alibi2d", "foo": 1}, r"has no option 'foo'"),
        ("alibi2d(wrap)", r"The option 'wrap' of alibi2d cannot be parsed. Use option=value"),
        ("alibi2d(wrap=)", r"The option 'wrap=' of alibi2d cannot be parsed"),
        ("alibi2d(wrap=true,)", r"The option '' of alibi2d cannot be parsed"),
        ("alibi2d(1a=3)", r"The option '1a=3' of alibi2d cannot be parsed"),
        ("alibi2d(wrap=true,wrap=false)", r"The option 'wrap' of alibi2d is specified twice"),
        ("alibi2d(wrap=true", r"unbalanced brackets"),
        ("alibi2d(spacing=[1,2)]", r"unbalanced brackets"),
        ("alibi2d)(", r"unbalanced brackets"),
        ("alibi2d(slopes='learned)", r"unbalanced quotes"),
        ("alibi2d(slopes=a b)", r"The value 'a b' cannot be parsed. Quote strings"),
        ("alibi2d(spacing={1:)})", r"unbalanced brackets"),
        ("alibi2d++sincos2d", r"The encoding '' cannot be parsed"),
        ("alibi 2d", r"The encoding 'alibi 2d' cannot be parsed"),
        ("", r"got ''"),
        ("  ", r"An encoding must be a name, a dict, a list of these or an Encoding"),
        ([], r"got \[\]"),
        (None, r"got None"),
        (3, r"got 3"),
        ({"wrap": True}, r"as dict needs a 'name', got keys \['wrap'\]"),
        ({"name": 3}, r"needs a 'name'"),
    ],
    ids=str,
)
def test_unreadable_specs(spec, message):
    with pytest.raises(OptionError, match=message):
        create_encoding(spec, num_heads=4, dim=8)
    assert isinstance(spec_error(spec), OptionError)


def test_options_and_facts():
    assert create_encoding("alibi2d", num_heads=4, wrap=False).wrap is False
    assert create_encoding("alibi2d.local", num_heads=4, wrap=True).wrap is True
    assert create_encoding("sincos2d", dim=8, num_heads=4, depth=3, grid=(2, 2)).dim == 8
    with pytest.raises(
        OptionError, match=r"needs num_heads\. Pass create_encoding\('alibi2d', num_heads=\.\.\.\)"
    ):
        create_encoding("alibi2d", dim=8)
    with pytest.raises(OptionError, match=r"learned needs dim, grid"):
        create_encoding("learned")
    with pytest.raises(OptionError, match=r"options to members of a sum, got \['wrap'\]"):
        create_encoding("alibi2d+sincos2d", num_heads=4, dim=8, wrap=True)
    with pytest.raises(OptionError, match=r"options to members of a sum, got \['wrap'\]"):
        create_encoding(["alibi2d", "sincos2d"], num_heads=4, dim=8, wrap=True)
    with pytest.raises(OptionError, match=r"alibi2d has no option 'wrp'\. Did you mean 'wrap'"):
        create_encoding("alibi2d", num_heads=4, wrp=True)


def test_an_encoding_and_its_host_agree_on_sizes():
    encoding = create_encoding("alibi2d", num_heads=4)
    for spec in (
        encoding,
        encoding.config,
        {"name": "alibi2d", "num_heads": 4},
        "alibi2d(num_heads=4)",
        [encoding, "none"],
    ):
        assert create_encoding(spec, num_heads=4)
        with pytest.raises(OptionError, match="alibi2d has num_heads=4 but the model has num_heads=6"):
            create_encoding(spec, num_heads=6)


def test_compose():
    with pytest.raises(UnsupportedCombination, match="needs at least one encoding"):
        Compose([])

    class Valued(Biased):
        name = "valued"

        def value_term(self, pos, layer):
            return object()

    class Turner(vispe.Rotary):
        name = "turner"

    with pytest.raises(UnsupportedCombination, match="2 encodings add to the attention output"):
        Compose([Valued(), Valued()]).value_term(None, 0)
    with pytest.raises(UnsupportedCombination, match=r"turner \+ turner: two rotary"):
        Compose([Turner(), Turner()])
    both = create_encoding("alibi2d(layers=[0])+alibi2d.local(layers=[2])", num_heads=4)
    assert [both.active(i) for i in range(4)] == [True, False, True, False]


def test_lists(registry, monkeypatch):
    examples = ("sincos2d", "none", "learned", "alibi2d", "alibi")
    monkeypatch.setattr(registry, "_REGISTRY", {n: registry._find_class(n) for n in examples})
    monkeypatch.setattr(registry, "_FILES", {})
    names = list_encodings()
    assert names == ["alibi", "alibi2d", "learned", "none", "sincos2d"]
    assert list_encodings("alibi*") == ["alibi", "alibi2d"]
    assert list_encodings("alibi2d.*") == ["alibi2d.dinosaw", "alibi2d.geometric", "alibi2d.local"]
    assert list_encodings(["sin*", "none"]) == ["none", "sincos2d"]
    assert list_encodings(exclude="*2d") == ["alibi", "learned", "none"]
    assert list_encodings("alibi2d.*", exclude=["*.local", "*.d*"]) == ["alibi2d.geometric"]
    assert list_encodings(kind="bias") == ["alibi", "alibi2d"]
    assert list_encodings(kind="additive") == ["learned", "sincos2d"]
    assert list_encodings(kind="rotary") == []
    assert list_encodings(ndim=1) == ["alibi", "none"]
    assert list_encodings(ndim=3) == ["none"]
    assert list_encodings("nothing") == []
    with pytest.raises(
        OptionError,
        match=r"kind must be one of additive, rotary, bias, mixing, positions, got 'biass'\. Did you",
    ):
        list_encodings(kind="biass")


def test_names_are_in_natural_order(registry):
    for i in (10, 9, 1):
        register(type(f"T{i}", (Encoding,), {"name": f"t{i}_x"}))
    assert list_encodings("t*_x") == ["t1_x", "t9_x", "t10_x"]


def test_info():
    info = encoding_info("alibi2d")
    assert info.name == "alibi2d"
    assert info.kinds == ("bias",)
    assert info.ndim == (2,)
    assert info.summary == "Attention falls off linearly with the distance between patches."
    assert "2603.16840" in info.paper
    assert info.options["wrap"] is True
    assert "num_heads" not in info.options
    assert info.presets["local"] == {"normalize": "none", "wrap": False}
    assert encoding_info("alibi2d.local").options == {**info.options, "normalize": "none", "wrap": False}
    assert encoding_info("none").options == {}
    assert encoding_info("none").kinds == ()
    assert encoding_info("learned").options == {"std": 0.02, "resample": "bicubic"}
    assert not encoding_info("learned").extrapolates
    info.presets["local"]["wrap"] = True  # a copy
    assert encoding_info("alibi2d").presets["local"]["wrap"] is False
    with pytest.raises(UnknownEncoding, match=r"There is no preset 'alibi2d\.foo'"):
        encoding_info("alibi2d.foo")
    with pytest.raises(AttributeError):
        info.name = "other"


def test_register(registry):
    assert register(Alibi2D) is Alibi2D  # the same class again
    with pytest.raises(OptionError, match=r"The name 'alibi2d' is already used by Alibi2D. Choose another"):
        register(type("Mine", (Encoding,), {"name": "alibi2d"}))
    for name in ("", "Alibi", "a.b", "a+b", "2d"):
        with pytest.raises(OptionError, match="Mine needs a lower_snake name to be registered, got name="):
            register(type("Mine", (Encoding,), {"name": name}))


PLUGIN = """
    import torch
    from vispe import Additive

    class Ramp(Additive):
        \"\"\"Adds the row to every channel.\"\"\"

        name = "{name}"

        def __init__(self, *, dim: int, gain: float = 1.0) -> None:
            super().__init__()
            self.dim, self.gain = dim, gain

        def table(self, pos, image=None):
            return self.gain * pos.coords[..., :1].expand(-1, -1, self.dim)
"""


@pytest.fixture
def install(registry, tmp_path, monkeypatch):
    """Return a function that adds a distribution with entry points and modules to the path."""

    def put(points, **modules):
        info = tmp_path / "ramp_encodings-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ramp-encodings\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[vispe.encodings]\n" + "\n".join(points) + "\n")
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        monkeypatch.syspath_prepend(tmp_path)
        registry._load_plugins.cache_clear()

    yield put
    monkeypatch.undo()
    registry._load_plugins.cache_clear()
    for name in [m for m in sys.modules if m.startswith("ramp_")]:
        del sys.modules[name]


def test_encodings_of_other_packages(install):
    registers = (
        textwrap.dedent(PLUGIN.format(name="ramp_two")) + "\nfrom vispe import register\nregister(Ramp)\n"
    )
    install(
        [
            "ramp = ramp_one:Ramp",
            "two = ramp_two",
            "gone = ramp_gone:Ramp",
            "bad = ramp_one:Missing",
            "own = ramp_own",
        ],
        ramp_one=PLUGIN.format(name="ramp"),
        ramp_two=registers,
        ramp_own="raise RuntimeError('of this package')",
    )
    with pytest.warns(RuntimeWarning, match="cannot be loaded") as warnings:
        assert list_encodings("ramp*") == ["ramp", "ramp_two"]
    messages = sorted(str(w.message) for w in warnings)
    assert len(messages) == 3
    assert (
        "'own' of ramp-encodings cannot be loaded from 'ramp_own', got RuntimeError: of this" in messages[2]
    )
    assert messages[0].startswith(
        "The encoding 'bad' of ramp-encodings cannot be loaded from 'ramp_one:Missing', got "
    )
    assert messages[1].startswith(
        "The encoding 'gone' of ramp-encodings cannot be loaded from 'ramp_gone:Ramp', got "
    )
    encoding = create_encoding("ramp(gain=2)+alibi2d", dim=4, num_heads=2)
    table = encoding.parts()[0].table(vispe.Grid((3, 1)).positions())
    assert table[0, :, 0].tolist() == [0.0, 2.0, 4.0]


@pytest.mark.parametrize(
    ("point", "name", "message"),
    [
        ("ramp = ramp_one:Ramp", "alibi2d", "The name 'alibi2d' is already used by Alibi2D. Choose another"),
        (
            "ramp = ramp_one:torch.pi",
            "ramp",
            r"entry point 'ramp' of group vispe\.encodings must be .* got 3\.14",
        ),
    ],
)
def test_invalid_packages(install, point, name, message):
    install([point], ramp_one=PLUGIN.format(name=name))
    with pytest.raises(OptionError, match=message):
        list_encodings()


def test_config_is_json_and_rebuilds():
    import json

    encoding = create_encoding("alibi2d(spacing=[2,1],layers=[0,1],slopes=learned)", num_heads=4, depth=3)
    rebuilt = create_encoding(json.loads(json.dumps(encoding.config)))
    assert rebuilt.config == encoding.config
    assert json.loads(json.dumps(encoding.spec)) == {
        "name": "alibi2d", "slopes": "learned", "spacing": [2.0, 1.0], "layers": [0, 1],
    }  # fmt: skip
    assert isinstance(rebuilt.slope, torch.nn.Parameter)
