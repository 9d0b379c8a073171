"""Fitted scikit-learn estimators in a model file, restricted to known types; no pickle."""

import io
import re
import zipfile
from pathlib import Path
from typing import Any

from vispe.errors import InputError, require, short
from vispe.images.formats.decoded_image import BROKEN
from vispe.segment.model.archive import check_archive, pack
from vispe.segment.model.parameter_checks import check_estimator

TRUSTED = frozenset(
    {"sklearn.tree._tree.Tree", "sklearn.ensemble._hist_gradient_boosting.predictor.TreePredictor"}
)
"""Trusted types in addition to those of skops; their numbers are checked by `check_estimator`."""


def read_estimator(path: Path, data: bytes, kind: str, n_classes: int) -> Any:
    """Load the scikit-learn estimator of a classifier, restricted to known types, and check its numbers.

    Raises:
        InputError: the estimator is damaged, has unknown types, or was not written by vispe.
    """
    import skops.io
    from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
    from sklearn.pipeline import Pipeline

    classes = {"forest": RandomForestClassifier, "boosting": HistGradientBoostingClassifier}
    try:
        check_archive(path, data)
        untrusted = sorted(set(skops.io.get_untrusted_types(data=data)) - TRUSTED)
    except InputError:
        raise
    except (*BROKEN, zipfile.BadZipFile) as error:
        reason = short(error, 200)
        raise InputError(
            f"{path} is damaged: its estimator cannot be read ({reason}). Train the model again."
        ) from error
    if untrusted:
        raise InputError(
            f"{path} was rejected: its estimator contains untrusted types ({', '.join(untrusted)}). "
            "Use only model files from a trusted source."
        )
    try:
        estimator = skops.io.loads(data, trusted=sorted(TRUSTED))
    except (*BROKEN, zipfile.BadZipFile) as error:
        reason = short(error, 200)
        raise InputError(
            f"{path}: scikit-learn cannot load the estimator ({reason}); its version may differ from the one in "
            "card.json. Train the model again."
        ) from error
    if type(estimator) is not classes.get(kind, Pipeline):
        raise InputError(
            f"{path} declares {kind!r} but contains a {type(estimator).__name__}. Train the model again."
        )
    check_estimator(path, estimator, kind, n_classes)
    return estimator


def estimator_bytes(estimator: Any) -> bytes:
    """Return a fitted estimator as a skops archive; equal estimators give equal bytes.

    Raises:
        MissingExtra: skops is not installed.
    """
    require("skops", "cli", "a model file")
    import skops.io

    return _canonical(skops.io.dumps(estimator))


def _canonical(data: bytes) -> bytes:
    """Renumber the object identifiers of a skops archive (memory addresses) in order of appearance."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    schema = parts.pop("schema.json").decode()
    numbers: dict[str, str] = {}
    for match in re.findall(r'"__id__": (\d+)|"file": "(\d+)\.', schema):
        number = match[0] or match[1]
        numbers.setdefault(number, str(len(numbers)))
    schema = re.sub(r'("__id__": )(\d+)', lambda m: m[1] + numbers[m[2]], schema)
    schema = re.sub(r'("file": ")(\d+)(\.)', lambda m: m[1] + numbers[m[2]] + m[3], schema)
    renamed = {re.sub(r"^\d+", lambda m: numbers[m[0]], name): part for name, part in parts.items()}
    return pack({"schema.json": schema.encode(), **dict(sorted(renamed.items()))}, zipfile.ZIP_DEFLATED)
