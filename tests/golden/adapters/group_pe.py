"""Golden cases of group positions: suffixes that start at the same position, and sources with their targets."""

import torch

from vispe.multimodal import Stream, Text, create_scheme
from vispe.multimodal.streams.simultaneous_translation import streamed


def run(case):
    yield "float64", _suffixes(case) if "group_info" in case.inputs else _streaming(case)


def _suffixes(case):
    rows = [
        [Text(n, shared=number > 0) for number, n in enumerate(row) if n > 0]
        for row in case.input("group_info").tolist()
    ]
    stream = Stream.of(rows, padding=case.config("padding_mode"))
    coordinates = create_scheme("group_pe").coordinates(stream, padding=case.config("padding_value"))
    return {"position_ids": coordinates.ids[0]}


def _streaming(case):
    total = case.config("total_length")
    pairs = streamed(
        case.input("source_segments"),
        case.input("target_segments"),
        source_prompt=case.config("source_instruct_length"),
        target_prompt=case.config("target_instruct_length"),
        end=case.config("end_instruct_length"),
        length=total,
        mode=case.config("mode"),
    )
    coordinates = create_scheme("group_pe", phi=case.config("pe_cache_length")).coordinates(pairs.stream)
    decoded = coordinates.decode(total)[0]  # the reference counts padding as if the target went on
    lengths = pairs.stream.lengths.tolist()
    ids = [
        torch.cat([row[:n], go[: total - n]])
        for row, go, n in zip(coordinates.ids[0], decoded, lengths, strict=True)
    ]
    result = {"position_ids": torch.stack(ids), "mask_index": pairs.mask_index()}
    return result | {"source_token_len": pairs.source_lengths, "target_token_len": pairs.target_lengths}
