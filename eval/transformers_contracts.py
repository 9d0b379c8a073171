"""Run transformers' own tests with every model converted, against the counts of stock.

    pip install pytest parameterized httpx
    python eval/transformers_contracts.py --source CHECKOUT [--families llava vit ...] [--specs own vrope ...]

Vision-language models take position schemes, `own` is the one that they were trained with; vision models encodings.

The tests of models are in transformers' repository only, so `--source` names a checkout of it. The mixins that they
share are taken from the source release of the installed version, fetched from the package index; `--source A B` lays
folder B over A in its place and fetches nothing. Writes eval/results/transformers_contracts.json after every family
and scheme; a run that was stopped goes on where it was. Every test whose outcome is not that of stock is listed with
its reason; one without a reason is an error. What is left out, for stock too, is in `LEFT_OUT`.
"""

from __future__ import annotations

import argparse
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

import checkout  # noqa: F401  (finds vispe)

from vispe.hosts.transformers.language.families import FAMILIES

OUT = Path(__file__).parent / "results" / "transformers_contracts.json"
NO_TESTS = ("glmga", "pp_chart2table", "molmo2")  # other names of glm46v and got_ocr2; none at this version
FOLDERS = {"qwen2_5_omni_thinker": "qwen2_5_omni", "qwen3_omni_moe_thinker": "qwen3_omni_moe"}
LANGUAGE = tuple(name for name in FAMILIES if name not in NO_TESTS)
SCHEMES = ("own", "vrope", "v2pe")
VISION = (
    "vit", "deit", "vit_msn", "vit_mae", "ijepa", "pixio", "beit", "dinov2", "dinov2_with_registers", "dinov3_vit",
    "siglip", "swin", "vitdet", "sam", "sam_hq",
)  # fmt: skip
ENCODINGS = ("alibi2d", "rope_mixed")
LEFT_OUT = {
    "compile": "minutes per test; compiled steps are tested in tests/hosts/transformers",
    "export": "torch.export of a whole model with pictures is not offered",
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
        "",
        "",
        "test_mismatching_num_image_tokens",
        "the same ValueError, but the words are those of vispe: which sample and which segment does not fit",
    ),
    (
        "qwen",
        "",
        "test_forward_with_rope_deltas_cached",
        "nothing about a sequence is kept on the model; get_rope_index returns the deltas, the cache holds the rest",
    ),
    (
        "qwen",
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
        "test_assisted_decoding_matches_greedy_search_0_random",
        "its prompt ends with padding, after which the host numbers words from 1 again, inside the prompt; a cache "
        "that is cropped there is refused",
    ),
    (
        "qwen",
        "",
        "test_generate_continue_from_past_key_values",
        "fails now and then: the random model says the token of a picture, which is counted as one without pixels",
    ),
    (
        "glm|ernie",
        "",
        "test_inputs_embeds",
        "the test leaves grids out and placeholders in, which stock counts as words; here nothing says where they are",
    ),
    (
        "gemma4",
        "",
        "Gemma4Vision2Text",
        "its pictures have 4 x 5 patches, of which pooling by 2 x 2 makes no grid; a picture without one is refused",
    ),
    (
        "vipllava",
        "",
        "",
        "the tester's mask hides words 1 that it drew at random, of which some stand where it puts the picture later; "
        "a picture of which a token is hidden is refused",
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
        "omni",
        "",
        "",
        "the tester draws words at random, the token of videos among them; a placeholder without a video is refused",
    ),
    (
        "",
        "rope_mixed",
        "test_can_init_all_missing_weights",
        "the encoding is initialised, but by torch.rand; the test seeds the functions of torch.nn.init alone",
    ),
    (
        "beit|swin",
        "",
        "test_reverse_loading_mapping",
        "the test looks for the relative table among the weights, and it was taken out",
    ),
)
PLUGIN = '''
"""Convert every vision-language model of transformers as soon as it is built."""
import os, sys, warnings
from transformers import PreTrainedModel

spec, family = os.environ["VISPE_SPEC"], os.environ["VISPE_FAMILY"]

def wanted(model):
    """The spec of a model, None where it takes none; 'own' is what its authors trained it with."""
    if family in FAMILIES:
        named = getattr(model.config, "model_type", "") == family and is_vlm(model)
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

if spec != "stock":
    import vispe
    from vispe.hosts.transformers.classes import stock_of
    from vispe.hosts.transformers.language.convert import is_vlm
    from vispe.hosts.transformers.language.families import FAMILIES, family_of
    from vispe.hosts.transformers.vision.family import family_of as tower_of
    from vispe.hosts.windows.family import family_of as windows_of
    PreTrainedModel.post_init = built

def pytest_collection_modifyitems(items):
    """Masks of ones: some testers give triangular ones, which hide pictures that are in the batch."""
    tester = getattr(sys.modules.get("tests.multimodal_tester"), "MultiModalModelTester", None)
    if tester is not None:
        tester.create_attention_mask = lambda self, input_ids: input_ids.new_ones(input_ids.shape)
'''
Outcomes = dict[str, tuple[str, str]]  # of each test: passed, skipped or failed, and the message


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
    versions = {p: metadata.version(p) for p in ("transformers", "torch", "vispe")}
    kept = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    rows = {(r["family"], r["scheme"]): r for r in kept}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        laid_out(folder, args.source, versions["transformers"])
        for family in args.families:
            default = SCHEMES if family in LANGUAGE else ENCODINGS
            for scheme in ("stock", *(default if args.specs is None else args.specs)):
                if (family, scheme) in rows:
                    continue
                found = run(folder, family, scheme)
                rows[family, scheme] = row(family, scheme, found, rows.get((family, "stock")))
                write(args.out, versions, rows)
                print(family, scheme, rows[family, scheme]["counts"], flush=True)
    for (family, scheme), kept in rows.items():  # reasons may have been found since
        for difference in kept.get("differences", []):
            difference["reason"] = reason_of(family, scheme, difference["test"])
    write(args.out, versions, rows)
    for kind in (LANGUAGE, VISION):
        print(table({key: found for key, found in rows.items() if key[0] in kind}))
    open_ = [d for r in rows.values() for d in r.get("differences", []) if not d["reason"]]
    sys.exit(f"{len(open_)} differences from stock have no reason." if open_ else 0)


def write(out: Path, versions: dict[str, str], rows: dict[tuple[str, str], dict]) -> None:
    """Write all rows, so that a run can go on after them."""
    about = {"versions": versions, "left_out": LEFT_OUT, "rows": list(rows.values())}
    out.write_text(json.dumps(about, indent=1) + "\n")


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
    (folder / "vispe_in_transformers.py").write_text(PLUGIN)
    (folder / "pytest.ini").write_text("[pytest]\n")


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


def row(family: str, scheme: str, found: Outcomes, stock: dict | None) -> dict:
    """Return what is kept of a run: counts, and names where they say something."""
    kept: dict = {
        "family": family,
        "scheme": scheme,
        "counts": dict(Counter(outcome for outcome, _ in found.values())),
    }
    names = {
        kind: sorted(n for n, (outcome, _) in found.items() if outcome == kind)
        for kind in ("failed", "skipped")
    }
    if stock is None:
        return kept | names
    kept["differences"] = []
    for name, (outcome, message) in sorted(found.items()):
        before = next((kind for kind in names if name in stock[kind]), "passed")
        if outcome != before:
            reason = reason_of(family, scheme, name)
            kept["differences"].append(
                {"test": name, "stock": before, "here": outcome, "reason": reason, "message": message}
            )
    return kept


def reason_of(family: str, scheme: str, name: str) -> str:
    """Return why a test differs from stock; empty where nothing says so."""
    for families, schemes, tests, reason in REASONS:
        if re.search(families, family) and re.search(schemes, scheme) and re.search(tests, name):
            return reason
    return ""


def table(rows: dict[tuple[str, str], dict]) -> str:
    """Return the counts as a table for the documentation."""
    schemes = list(dict.fromkeys(scheme for _, scheme in rows))
    lines = ["| family | " + " | ".join(schemes) + " |", "|---" * (1 + len(schemes)) + "|"]
    for family in dict.fromkeys(family for family, _ in rows):
        counts = (rows.get((family, scheme), {"counts": {}})["counts"] for scheme in schemes)
        cells = ["/".join(str(c.get(k, 0)) for k in ("passed", "skipped", "failed")) for c in counts]
        lines.append(f"| {family} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
