"""Run the tests of transformers with every model converted, and compare the outcomes with stock.

    pip install pytest parameterized httpx datasets librosa  # datasets: imported by the tests of BEiT, librosa: Omni
    python eval/transformers_contracts.py --source CHECKOUT [--families llava vit ...] [--specs own vrope ...]

Vision-language models take position schemes, `own` is the one that they were trained with; vision models encodings.

The tests of models are in transformers' repository only, so `--source` names a checkout of it. The mixins that they
share are taken from the source release of the installed version, fetched from the package index; `--source A B` lays
folder B over A instead and fetches nothing. Two helpers that neither source may have are added where they are missing:
the launcher of several processes (a stub; its tests are omitted) and the sizes of small text models, which are read
from the checkout's src/transformers/testing_utils.py. Writes eval/results/transformers_contracts.json after every
family and scheme; an interrupted run resumes. All rows of a file are of one version of transformers. Every test whose
outcome is not that of stock is listed with its reason; one without a reason is an error. `LEFT_OUT` has the tests that
are skipped, for stock too.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import checkout  # noqa: F401  (finds vispe)

import vispe
from vispe.hosts.transformers.language.families import FAMILIES

OUT = Path(__file__).parent / "results" / "transformers_contracts.json"
NO_TESTS = (  # other names of glm46v and got_ocr2, or none at this version
    "glmga", "pp_chart2table", "molmo2", "qwen4_exp", "hy_v4_vl", "hyperclovax_vision_v2", "muse_spark",
    "mistral_large4", "granite_docling", "minicpm_ocr", "unlimited_ocr",
)  # fmt: skip
FOLDERS = {"qwen2_5_omni_thinker": "qwen2_5_omni", "qwen3_omni_moe_thinker": "qwen3_omni_moe"}
LANGUAGE = tuple(name for name in FAMILIES if name not in NO_TESTS)
SCHEMES = ("own", "vrope", "v2pe")
VISION = (
    "vit", "deit", "vit_msn", "vit_mae", "ijepa", "pixio", "beit", "dinov2", "dinov2_with_registers", "dinov3_vit",
    "siglip", "swin", "vitdet", "sam", "sam_hq", "tipsv2", "radio", "dpt", "vitpose_backbone", "sapiens2", "aimv2",
    "chinese_clip", "altclip", "clipseg", "metaclip_2", "owlvit", "owlv2",
)  # fmt: skip
ENCODINGS = ("alibi2d", "rope_mixed")
LEFT_OUT = {
    "compil": "minutes per test; compiled steps are tested in tests/hosts/transformers",
    "export": "torch.export of a complete vision-language model is not supported",
    "test_bc_torch_dtype": "needs the hub",
    "fsdp": "needs several processes",
    "hsdp": "needs several processes",
}
REASONS = (  # family, scheme and test (patterns), and why the outcome is not that of stock
    (
        "",
        "",
        "test_model_rope_scaling_from_config_1_dynamic",
        "frequencies that depend on the length of a call are refused: they are not those of the keys in the cache",
    ),
    (
        "qwen3_5_moe",
        "",
        "test_custom_4d_attention_mask",
        "ids that restart are packed samples, which layers of linear attention would mix: they are refused. The stock "
        "model mixes them, within the tolerance of the test",
    ),
    (
        "",
        "",
        "test_sdpa_padding_matches_padding_free_with_position_ids",
        "the mask is random: the test is skipped if it has no padding, with the stock model as well",
    ),
    (
        "",
        "",
        "test_mismatching_num_image_tokens",
        "the same ValueError, but the words are those of vispe: which sample and which segment does not fit",
    ),
    (
        "qwen",
        "",
        "test_forward_with_rope_deltas_cached",
        "the model stores nothing about a sequence; get_rope_index returns the deltas, the cache stores the rest",
    ),
    (
        "",
        "",
        "test_bc_cache_name_forward",
        "skipped unless the class of the cache is DynamicCache itself; here it is a subclass, in which the state of "
        "the sequences follows the rows. tests/hosts/transformers/language/test_cache_names.py tests the same: both "
        "names of the cache give equal outputs",
    ),
    (
        "qwen|glm",
        "^(?!own)",
        "test_vision_position_ids",
        "it asks for the numbers of MRoPE, and get_rope_index gives those of the scheme",
    ),
    (
        "qwen",
        "vrope|v2pe",
        "padding_matches_padding_free_with_position_ids",
        "the test puts three axes together, and the scheme has another number of them",
    ),
    (
        "qwen",
        "v2pe",
        "test_assisted_decoding_matches_greedy_search",
        "its prompt ends with padding, after which the host numbers words from 1 again, inside the prompt; a cache "
        "that is cropped there is refused",
    ),
    (
        "qwen",
        "",
        "test_generate_continue_from_past_key_values",
        "fails now and then: the random model says the token of an image, which is counted as one without pixels",
    ),
    (
        "glm|ernie",
        "",
        "test_inputs_embeds",
        "the test removes the grids and keeps the image tokens; stock numbers them as text, "
        "vispe needs the grid and raises",
    ),
    (
        "gemma4",
        "",
        "Gemma4Vision2Text",
        "its images have 4 x 5 patches, of which pooling by 2 x 2 makes no grid; an image without one is refused",
    ),
    (
        "vipllava",
        "",
        "padding_matches_padding_free",
        "skipped now and then, for stock too: it asks for a word that the mask hides, and words are drawn at random",
    ),
    (
        "^(sam|sam_hq|vitdet)$",
        "rope_mixed",
        "",
        "heads of 9 channels cannot turn in two axes, and are refused",
    ),
    (
        "omni",
        "",
        "test_get_rope_index_video_with_audio",
        "audio that is woven into the frames of a video is refused: a stream describes frames as one block",
    ),
    (
        "",
        "rope_mixed",
        "test_can_init_all_missing_weights",
        "models are converted here when their weights are drawn, with other numbers than those after the test's seed; "
        "a model from an empty checkpoint has all its weights initialised, too",
    ),
    (
        "beit|swin",
        "",
        "test_reverse_loading_mapping",
        "the test looks for the relative table among the weights, and it was taken out",
    ),
)
DEFAULTS = "_TEXT_MODEL_TESTER_DEFAULTS"
LAUNCHER = '''
"""Stub of a helper that the source release lacks: tests in several processes are skipped."""
import unittest

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    def skipped(*args, **kwargs):
        raise unittest.SkipTest("needs several processes")
    return skipped
'''
PLUGIN = '''
"""Convert every vision-language model of transformers as soon as it is built."""
import copy, json, os, pathlib, sys, warnings
from transformers import PreTrainedModel, testing_utils

sizes = pathlib.Path(__file__).with_name("sizes.json")
if sizes.exists():
    vars(testing_utils).update(json.loads(sizes.read_text()))
spec, family = os.environ["VISPE_SPEC"], os.environ["VISPE_FAMILY"]
converted = 0

def wanted(model):
    """The spec of a model, None where it takes none; 'own' is what its authors trained it with."""
    if family in FAMILIES:
        named = getattr(model.config, "model_type", "") == family and is_vision_language_model(model)
        return None if not named else family_of(model.config).own(model.config) if spec == "own" else spec
    here = type(model).__module__.endswith(f"modeling_{family}")
    takes = tower_of(model) is not None or windows_of(model) is not None
    return spec if here and takes else None

def built(model, stock=PreTrainedModel.post_init):
    stock(model)
    chosen = wanted(model)
    if chosen is None:
        return
    while stock_of(type(model)) is not None:
        model.__class__ = stock_of(type(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        vispe.convert(model, chosen)
    global converted
    converted += 1

def pytest_sessionfinish():
    pathlib.Path(__file__).with_name("converted.txt").write_text(str(converted))

if spec != "stock":
    import vispe
    from vispe.hosts.transformers.subclasses import stock_of
    from vispe.hosts.transformers.language.convert import is_vision_language_model
    from vispe.hosts.transformers.language.families import FAMILIES, family_of
    from vispe.hosts.transformers.vision.families import family_of as tower_of
    from vispe.hosts.windows.families import family_of as windows_of
    PreTrainedModel.post_init = built

def pytest_collection_modifyitems(items):
    """Inputs as processors make them.

    Masks of ones, since some testers give triangular ones, which hide images that are in the batch; others hide
    words that they drew at random before they put an image there. And no words that say video, without one.
    Each configuration has its own dictionaries: that of a vision tower sets rope_type of the dictionary it gets to
    'axial', and testers pass the same one to the text model, which cannot be built then.
    """
    tester = getattr(sys.modules.get("tests.multimodal_tester"), "MultiModalModelTester", None)
    if tester is not None:
        collected = tester._collect_kwargs
        tester._collect_kwargs = lambda self, *names: copy.deepcopy(collected(self, *names))
        tester.create_attention_mask = lambda self, input_ids: input_ids.new_ones(input_ids.shape)
    loaded = [vars(module) for name, module in list(sys.modules.items()) if name.startswith("tests.models.")]
    names = ["Qwen2_5OmniThinkerForConditionalGenerationTester", "VipLlavaVisionText2TextModelTester"]
    names += ["Qwen3OmniMoeThinkerForConditionalGenerationTester"]
    for kind in {space[name] for space in loaded for name in names if name in space}:
        kind.prepare_config_and_inputs_for_common = tidied(kind.prepare_config_and_inputs_for_common)

def tidied(drawn):
    def prepared(self):
        config, inputs = drawn(self)
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        ids[ids == getattr(config, "video_token_id", -1)] = config.get_text_config().pad_token_id or 0
        mask[ids == config.image_token_id] = 1
        return config, inputs
    return prepared
'''
Outcomes = dict[str, tuple[str, str]]  # of each test: passed, skipped or failed, and the message


class Change(NamedTuple):
    """How a test ended with the stock model and here."""

    test: str
    stock: str
    here: str
    message: str


def main() -> None:
    """Run each family stock, then with every scheme that the file does not have."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", type=Path, nargs="+", required=True, help="folders with tests/")
    parser.add_argument("--families", nargs="+", choices=LANGUAGE + VISION, default=LANGUAGE + VISION)
    parser.add_argument(
        "--specs", nargs="*", help="schemes or encodings; those that the file is made of by default"
    )
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    versions = {p: metadata.version(p) for p in ("transformers", "torch")} | {"vispe": vispe.__version__}
    rows = read(args.out, versions["transformers"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        laid_out(folder, args.source, versions["transformers"])
        for family in args.families:
            default = SCHEMES if family in LANGUAGE else ENCODINGS
            remaining = [
                s for s in (default if args.specs is None else args.specs) if (family, s) not in rows
            ]
            stock = run(folder, family, "stock") if remaining else {}
            if remaining:
                rows[family, "stock"] = {"family": family, "scheme": "stock", "counts": counts(stock)}
            for scheme in remaining:
                rows[family, scheme] = row(family, scheme, run(folder, family, scheme), stock)
                write(args.out, versions, rows)
                print(family, scheme, rows[family, scheme]["counts"], flush=True)
    for (family, scheme), result in rows.items():  # reasons may have been found since
        changes = [
            Change(test, group["stock"], group["here"], group.get("message", ""))
            for group in result.get("differences", [])
            for test in group["tests"]
        ]
        result |= {"differences": grouped(family, scheme, changes)} if changes else {}
    write(args.out, versions, rows)
    for families in (LANGUAGE, VISION):
        print(table({key: result for key, result in rows.items() if key[0] in families}))
    without = [g for r in rows.values() for g in r.get("differences", []) if not g["reason"]]
    for group in without:
        print(group)
    sys.exit("These differences from stock have no reason." if without else 0)


def read(out: Path, version: str) -> dict[tuple[str, str], dict]:
    """Return the rows of a file by family and scheme. Rows of another version of transformers are an error."""
    if not out.exists():
        return {}
    stored = json.loads(out.read_text())
    if (measured := stored["versions"]["transformers"]) != version:
        sys.exit(
            f"{out}: its rows are of transformers {measured}, but the installed version is {version}. "
            "Delete the file to measure every family again, or choose another --out."
        )
    return {(r["family"], r["scheme"]): r for r in stored["rows"]}


def write(out: Path, versions: dict[str, str], rows: dict[tuple[str, str], dict]) -> None:
    """Write all rows, one a line, so that a run can go on after them."""
    about = json.dumps({"versions": versions, "left_out": LEFT_OUT})
    lines = ",\n ".join(json.dumps(rows[key]) for key in sorted(rows, key=order))
    out.write_text(f'{about[:-1]}, "rows": [\n {lines}\n]}}\n')


def order(key: tuple[str, str]) -> tuple[int, int, str]:
    """Return the sort key of a row: families as in `LANGUAGE` and `VISION`, stock first, other specs last."""
    family, spec = key
    specs = ("stock", *SCHEMES, *ENCODINGS)
    return (LANGUAGE + VISION).index(family), (*specs, spec).index(spec), spec


def laid_out(folder: Path, sources: list[Path], version: str) -> None:
    """Put the tests and the plugin into an empty folder; later sources replace files of earlier ones."""
    if len(sources) == 1:
        sources = [*sources, fetch(folder / "release", version)]
    for source in sources:
        for part in ("tests", "utils"):
            if (source / part).exists():
                shutil.copytree(source / part, folder / part, dirs_exist_ok=True)
    (folder / "src").mkdir()  # the tests look at the files of the package, which is the installed one
    installed = metadata.distribution("transformers").locate_file("transformers")
    (folder / "src" / "transformers").symlink_to(str(installed))
    launcher = folder / "tests" / "distributed_testing_utils.py"
    if not launcher.exists():
        launcher.write_text(LAUNCHER)
    if sizes := next(filter(None, map(text_sizes, sources)), None):
        (folder / "sizes.json").write_text(json.dumps({DEFAULTS: sizes}))
    (folder / "vispe_in_transformers.py").write_text(PLUGIN)
    (folder / "pytest.ini").write_text("[pytest]\n")


def text_sizes(source: Path) -> dict | None:
    """Return the sizes of small text models that a checkout's testing_utils names; None where it names none."""
    file = source / "src" / "transformers" / "testing_utils.py"
    for statement in ast.parse(file.read_text()).body if file.exists() else ():
        names = [target.id for target in getattr(statement, "targets", ()) if isinstance(target, ast.Name)]
        if isinstance(statement, ast.Assign) and DEFAULTS in names:
            return ast.literal_eval(statement.value)
    return None


def fetch(folder: Path, version: str) -> Path:
    """Download the source release of transformers and return where it lies."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-build-isolation"]
    command += ["--no-binary", "transformers", "-d", str(folder), f"transformers=={version}"]
    subprocess.run(command, check=True)
    with tarfile.open(next(folder.glob("transformers-*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    return folder / f"transformers-{version}"


def run(folder: Path, family: str, scheme: str) -> Outcomes:
    """Return the outcome of every test of a family."""
    report = folder / f"{family}.xml"
    folder_of = FOLDERS.get(family, family)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "vispe_in_transformers", "-p", "no:cacheprovider"]
    command += ["-k", " and ".join(f"not {name}" for name in LEFT_OUT), "-W", "ignore"]
    command += [
        "-p",
        "no:warnings",
        f"--junitxml={report}",
        f"tests/models/{folder_of}/test_modeling_{folder_of}.py",
    ]
    paths = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    more = {"PYTHONPATH": paths, "VISPE_SPEC": scheme, "VISPE_FAMILY": family, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **more}, capture_output=True, text=True, check=False
    )
    if done.returncode not in (0, 1):
        sys.exit(
            f"transformers' tests of {family} did not run:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        )
    if scheme != "stock" and not int((folder / "converted.txt").read_text()):
        sys.exit(
            f"transformers' tests of {family}: no model was converted to {scheme}, so their counts are of stock."
        )
    outcomes: Outcomes = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        ended = {child.tag: child.get("message") or "" for child in case}
        failed = ended.get("failure", ended.get("error"))
        outcome = "failed" if failed is not None else "skipped" if "skipped" in ended else "passed"
        if outcomes.get(name, ("", ""))[0] != "failed":
            outcomes[name] = outcome, " ".join((failed or "").split())[:300]
    report.unlink()
    return outcomes


def row(family: str, scheme: str, result: Outcomes, stock: Outcomes) -> dict:
    """Return what is stored of a run: counts, and tests that end otherwise than with the stock model."""
    changes = [
        Change(name, stock.get(name, ("passed", ""))[0], outcome, message)
        for name, (outcome, message) in sorted(result.items())
        if stock.get(name, ("passed", ""))[0] != outcome
    ]
    retained = {"family": family, "scheme": scheme, "counts": counts(result)}
    return retained | ({"differences": grouped(family, scheme, changes)} if changes else {})


def counts(result: Outcomes) -> dict[str, int]:
    """Return how many tests ended in each way."""
    return dict(Counter(outcome for outcome, _ in result.values()))


def grouped(family: str, scheme: str, changes: list[Change]) -> list[dict]:
    """Return the tests of each reason, and a message where there is none."""
    groups: dict[tuple[str, str, str], list[Change]] = {}
    for change in changes:
        reason = reason_of(family, scheme, change.test)
        groups.setdefault((reason, change.stock, change.here), []).append(change)
    return [
        {"reason": reason, "stock": stock, "here": here, "tests": [c.test for c in result]}
        | ({} if reason else {"message": result[0].message})
        for (reason, stock, here), result in groups.items()
    ]


def reason_of(family: str, scheme: str, name: str) -> str:
    """Return why a test differs from stock; empty where nothing says so."""
    for families, schemes, tests, reason in REASONS:
        if re.search(families, family) and re.search(schemes, scheme) and re.search(tests, name):
            return reason
    return ""


def table(rows: dict[tuple[str, str], dict]) -> str:
    """Return the counts as a table for the documentation."""
    keys = sorted(rows, key=order)
    schemes = sorted({scheme for _, scheme in rows}, key=lambda scheme: order((keys[0][0], scheme)))
    head = ["family", *("stock" if scheme == "stock" else f"`{scheme}`" for scheme in schemes)]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for family in dict.fromkeys(family for family, _ in keys):
        result = (rows.get((family, scheme), {}).get("counts") for scheme in schemes)
        ends = ("passed", "skipped", "failed")
        cells = ["/".join(str(c.get(k, 0)) for k in ends) if c else "" for c in result]
        lines.append(f"| {family} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
