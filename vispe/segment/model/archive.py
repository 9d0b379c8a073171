"""Zip archive of a model file, which is untrusted input: it is checked before it is unpacked."""

import hashlib
import io
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vispe.backbones.model_names import check_kind, kind_of
from vispe.errors import InputError, short
from vispe.images.formats.decoded_image import BROKEN
from vispe.images.formats.size_limits import RATIO, machine_memory
from vispe.images.paths import check_file
from vispe.segment.model.card_checks import check_card, read_card

FORMAT = "vispe.segment"
VERSION = 2
"""Version of the layout; incremented when an older vispe cannot read new files."""

CARD, ESTIMATOR, TENSORS = "card.json", "estimator.skops", "tensors.safetensors"

_FREE = 100_000_000  # bytes to which any member may unpack, for any compression ratio
_MEMBER = re.compile(r"schema\.json|\d+\.npy")  # of the estimator


def check_archive(path: Path, data: bytes | None = None) -> None:
    """Reject a zip file with an excessive compression ratio, or with unknown members.

    Args:
        path: the model file.
        data: the estimator inside it; None checks the model file itself.

    Raises:
        InputError: the archive is rejected. A file that is not an archive raises zipfile's own errors.
    """
    memory = machine_memory()
    with zipfile.ZipFile(path if data is None else io.BytesIO(data)) as archive:
        names = archive.namelist()
        if data is not None:
            unknown = [n[:100] for n in names if not _MEMBER.fullmatch(n)]
        else:  # without a card it is not a model file, which `read_archive` reports
            unknown = [n[:100] for n in names if CARD in names and n not in (CARD, ESTIMATOR, TENSORS)]
        if unknown or len(set(names)) < len(names):
            listed = ", ".join(repr(n) for n in unknown[:3]) or "a duplicate name"
            what = "it" if data is None else "its estimator"
            raise InputError(f"{path} was rejected: {what} contains {listed}, unknown in models of vispe.")
        for info in archive.infolist():
            excessive = info.file_size > max(_FREE, RATIO * info.compress_size)
            if excessive or (memory is not None and info.file_size > memory // 2):
                raise InputError(
                    f"{path} was rejected: {info.filename} would unpack from {info.compress_size} to {info.file_size} "
                    "bytes. Train the model again."
                )


def read_archive(path: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the card of a model file and its other members by name, with their checksums verified.

    Raises:
        InputError: the file is missing, damaged, not a vispe model, or of another layout version.
    """
    if kind_of(path) == "retrofit" or (kind_of(path) != "timm" and not path.is_file()):
        check_kind(path, ("segmenter",))
    check_file(path, "pass the model.vispe file written by vispe segment")
    try:
        check_archive(path)
        with zipfile.ZipFile(path) as archive:
            parts = {n: archive.read(n) for n in (CARD, ESTIMATOR, TENSORS) if n in archive.namelist()}
        card = read_card(parts.pop(CARD))
    except InputError:
        raise
    except (*BROKEN, zipfile.BadZipFile) as error:
        raise InputError(
            f"{path} is not a complete vispe model file ({short(error)}). Train the model again."
        ) from error
    if not isinstance(card, dict) or card.get("format") != FORMAT:
        file_format = card.get("format") if isinstance(card, dict) else type(card).__name__
        raise InputError(f"{path} is not a segmentation model: format={file_format!r}, expected {FORMAT!r}.")
    if card.get("format_version") != VERSION:
        writer = card["versions"].get("vispe") if isinstance(card.get("versions"), dict) else "unknown"
        raise InputError(
            f"{path} has format_version={card.get('format_version')} (written by vispe {writer}), but this vispe reads "
            f"format_version={VERSION}. Use that version of vispe or train the model again."
        )
    if not isinstance(card.get("sha256"), dict):
        raise InputError(f"{path} is damaged: its card has no checksums. Copy the file again.")
    if set(card["sha256"]) != set(parts):
        listed, contents = (", ".join(sorted(names)) or "none" for names in (card["sha256"], parts))
        raise InputError(
            f"{path} is damaged: its card lists {listed}, but it contains {contents}. Copy the file again."
        )
    for name, digest in card["sha256"].items():
        if hashlib.sha256(parts[name]).hexdigest() != digest:
            raise InputError(f"{path} is damaged: {name} does not match its checksum. Copy the file again.")
    check_card(path, card)
    return card, parts


def read_tensors(path: Path, data: bytes) -> dict[str, np.ndarray]:
    """Return the arrays of a member of safetensors; InputError if it is damaged."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        return load(data)
    except SafetensorError as error:
        raise InputError(f"{path} is damaged: {error}. Copy the file again.") from error


def pack(parts: Mapping[str, bytes], compression: int) -> bytes:
    """Pack members with fixed time stamps, for reproducible bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in parts.items():
            info = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            info.compress_type = compression
            info.external_attr = 0o644 << 16
            archive.writestr(info, data)
    return buffer.getvalue()
