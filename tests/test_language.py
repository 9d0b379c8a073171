"""Vocabulary: words with a standard term in the field are not used in another sense.

The comment of each pattern names the term. `ALLOWED` lists public names and keys that contain such a word.
"""

import ast
import io
import json
import re
import tokenize
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PATTERNS = {
    "place": r"(?<!in )(?<!In )(?<!in-)(?<!decimal )(?<!take )(?<!takes )\bplaces?\b",  # position, coordinates
    "picture": r"\bpictures?\b",  # image, figure
    "kept": r"\bkept\b",  # cached, stored
    "turned": r"\b(?:is|are|was|were|be|been) turned\b|\bturned (?:image|by|labels|query|key|copy|sample)",  # rotated
    "beside": r"\bbeside\b",  # alongside, in addition to
    "is no": r"(?<!there )(?<!There )\b(?:is|are) no (?!longer|more\b|less|larger|smaller|better)",  # is not a
    "apart": r"\bapart\b(?! from)",  # separate
    "says which": r"\bsays? (?:which|how|what|where|whether|nothing)\b",  # documents, states
    "alike": r"\balike\b",  # equal
    "leave out": r"\b(?:leave|leaves|left|leaving) (?:it |them |\w+ )?out\b",  # omit, skip
    "asked": r"\b(?:was|were|is|are|be) asked\b",  # requested
    "anew": r"\banew\b",  # again
}
NAMES = (
    "found",
    "given",
    "wanted",
    "asked",
    "seen",
    "kept",
    "placed",
    "turned",
    "places",
    "pictures",
    "picture",
    "door",
    "knows",
    "lifted",
    "liked",
    "remedied",
    "shaken",
    "yours",
)

ALLOWED = (  # files, words, reason
    ("CHANGELOG.md", "place", "names of earlier versions"),
    ("eval/bench/*.py", "kept", "names of the rows in results of benchmarks"),
    ("eval/dinov2*.py", "picture pictures beside", "keys of results"),
    ("eval/docs_multimodal.py", "picture", "v2pe(per=picture)"),
    ("eval/schemes.py", "picture place", "names of tasks"),
    ("eval/segment/c*.py", "pictures", "keys of results"),
    ("eval/segment/materials.py", "picture", "argument of the program"),
    ("eval/segment/prior.py", "places", "key of cached labels"),
    ("eval/small_retrofit*.py", "picture pictures", "keys of results"),
    ("models/m*.py", "pictures", "key of model cards"),
    ("tests/cli/test_convert_weights.py", "kept", "key of the JSON report"),
    ("tests/encodings/positions/test_samplers.py", "kept", "option spacing=kept of samplers"),
    ("tests/experimental/measures/test_mlp_units.py", "places", "key of a result"),
    ("tests/golden/adapters/*.py", "picture places", "names of outputs and parameters; v2pe(per=picture)"),
    ("tests/models/test_*.py", "picture pictures", "keys of results"),
    ("tests/multimodal/*.py", "picture", "v2pe(per=picture), Blocks.picture"),
    ("tests/segment/run/test_reading.py", "places", "key of the file of suggestions"),
    ("tests/segment/test_suggest.py", "places", "key of the file of suggestions"),
    ("tests/train/data/test_*.py", "pictures", "kind and key of a source of images"),
    ("tests/train/random_images.py", "pictures", "kind of a source of images"),
    ("tests/train/retrofit/test_checkpoint.py", "pictures", "key of model cards"),
    ("tests/train/retrofit/test_p*.py", "place", "loss.place, augment.place"),
    ("tests/train/vlm/test_lora.py", "picture place", "names of tasks"),
    ("docs/explanation/samplers.md", "place kept", "loss.place, augment.place, spacing=kept"),
    ("docs/how-to/micrographs/materials.md", "picture", "argument of eval/segment/materials.py"),
    ("docs/how-to/models/special-inputs.md", "place", "option of extended_mind"),
    ("docs/how-to/models/schemes.md", "picture", "v2pe(per=picture)"),
    ("docs/reference/upgrade.md", "kept picture pictures", "names of earlier versions"),
    ("docs/how-to/models/retrofit.md", "place", "loss.place, augment.place"),
    ("vispe/cli/commands/models/convert_weights.py", "kept", "key of the JSON report"),
    ("vispe/cli/commands/models/retrofit.py", "place", "loss.place, augment.place"),
    ("vispe/encodings/p*/*.py", "kept", "option spacing=kept of samplers"),
    ("vispe/evaluate/attention/rotary_bands.py", "alike", "key of the records in a checkpoint of an audit"),
    ("vispe/evaluate/audit/checkpoint.py", "kept", "key of the checkpoint of an audit"),
    (
        "vispe/evaluate/behaviour/*.py",
        "picture pictures places",
        "text of prompts; keys; MirroredPair.pictures",
    ),
    ("vispe/evaluate/evaluated.py", "picture", "EvaluatedModel.picture"),
    ("vispe/evaluate/features/*.py", "pictures", "keys of the results of an audit"),
    ("vispe/evaluate/rotation/report.py", "picture", "RotationReport.picture"),
    ("vispe/experimental/measures/*.py", "places", "keys of results"),
    ("vispe/experimental/vlm/*.py", "place picture", "names of tasks"),
    ("vispe/hosts/common/conversion/sampler_checks.py", "kept", "option spacing=kept of samplers"),
    ("vispe/multimodal/sampling.py", "places", "keyword of sampled"),
    ("vispe/multimodal/schemes/v2pe.py", "picture", "v2pe(per=picture)"),
    ("vispe/multimodal/streams/attention_blocks.py", "picture", "Blocks.picture"),
    ("vispe/*/suggest*.py", "places", "key of the JSON file of suggestions"),
    ("vispe/segment/napari/results.py", "places", "value in the metadata of layers"),
    ("vispe/segment/out_of_core/*.py", "picture", "name of an array in unfinished results"),
    ("vispe/images/symmetry/translations.py", "seen", "Placement.seen"),
    ("vispe/train/data/*.py", "place pictures", "augment.place; key of a fingerprint"),
    ("vispe/train/retrofit/*.py", "place pictures", "loss.place, augment.place; key of the report"),
    ("vispe/train/vlm/*.py", "wanted", "Sample.wanted"),
)

EXCLUDED = ("tests/test_language.py",)

PROSE = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", None))


# part of every match: most files lack it, and a pattern takes ten times as long
STEMS = dict(zip(PATTERNS, PATTERNS, strict=True)) | {
    "is no": " no ",
    "says which": "say",
    "leave out": " out",
}
ANY_NAME = re.compile(rf"\b(?:{'|'.join(NAMES)})\b")


def texts(path):
    """Yield the prose of a file: comments and strings of Python, everything of other files."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        if not any(STEMS[name] in text and re.search(pattern, text) for name, pattern in PATTERNS.items()):
            return  # splitting into tokens takes most of the time
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in PROSE:
                yield token.string
    elif path.suffix == ".ipynb":
        for cell in json.loads(text)["cells"]:
            if cell["cell_type"] == "markdown":
                yield "".join(cell["source"])
    elif path.name == "CHANGELOG.md":
        yield text.split("\n## ")[1]  # entries of the version to come
    else:
        yield re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def names_of(path):
    """Yield the names that a file binds."""
    text = path.read_text(encoding="utf-8")
    if not ANY_NAME.search(text):
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name


FILES = sorted(
    path
    for pattern in (
        "vispe/**/*.py",
        "vispe/**/*.js",
        "vispe/**/*.html",
        "docs/**/*.js",
        "docs/**/*.md",
        "docs/**/*.ipynb",
        "configs/*.yaml",
        "README.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        ".ci/*",
        ".github/**/*.*",
        "eval/**/*.py",
        "eval/*.md",
        "models/**/*.py",
        "models/*.md",
        "data/**/*.md",
        "data/**/*.py",
        "tests/**/*.py",
        "tests/*.md",
    )
    for path in ROOT.glob(pattern)
    if path.is_file() and not path.relative_to(ROOT).as_posix().startswith(EXCLUDED)
)


def occurrences():
    """Yield the file and the word of each occurrence."""
    for path in FILES:
        for text in texts(path):
            for pattern in PATTERNS.values():
                for match in re.finditer(pattern, text):
                    yield path, match[0]
        if path.suffix == ".py":
            for word in names_of(path):
                if word in NAMES:
                    yield path, word


def permission(path, word):
    """Return the index of the entry of `ALLOWED` for a word in a file; None without."""
    relative = path.relative_to(ROOT).as_posix()
    return next(
        (
            n
            for n, (files, words, _) in enumerate(ALLOWED)
            if fnmatch(relative, files) and word in words.split()
        ),
        None,
    )


@pytest.fixture(scope="module")
def present(without_collector):
    """Return the (file, word) that are not in `ALLOWED`, and the (entry, word) of `ALLOWED` that occur."""
    wrong, used = Counter(), set()
    for path, word in occurrences():
        entry = permission(path, word)
        if entry is None:
            wrong[path.relative_to(ROOT).as_posix(), word] += 1
        else:
            used.add((entry, word))
    return wrong, used


def test_words_have_the_sense_that_they_have_in_the_field(present):
    wrong, _ = present
    assert not wrong


def test_every_exception_is_needed(present):
    _, used = present
    unused = [
        (files, word)
        for n, (files, words, _) in enumerate(ALLOWED)
        for word in words.split()
        if (n, word) not in used
    ]
    assert not unused, f"no longer needed in ALLOWED: {unused}"
