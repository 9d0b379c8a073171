"""Golden cases of PPE: merged tokens with their positions, and rotated queries and keys."""

import torch

from tests.golden.adapters._rotary import requested, rotated
from vispe.grid.frequencies import inverse_frequencies
from vispe.multimodal import create_scheme, rotation
from vispe.multimodal.schemes.ppe import reference_rotation, reference_sections
from vispe.multimodal.streams.token_merging import merge_tokens


def run(case):
    case.ignore("grid_thw", "what the given positions were made from")
    case.ignore("sort", "how the reference was made reproducible")
    if not case.config("uniform_token_weight"):
        raise ValueError("weights are not in the case")
    members, sections = case.config("ppe_k"), tuple(case.config("mrope_section"))
    members = members if case.config("use_ppe") else 1
    merged = merge_tokens(
        case.input("tokens"),
        case.input("cluster_index"),
        case.input("position_ids")[:, None],
        members=members,
        clusters=case.config("num_clusters"),
        epsilon=1e-6,
    )
    result = {"merged_tokens": merged.tokens, "merged_position_ids": merged.ids[:, 0]}
    result["effective_section"] = torch.tensor(reference_sections(sections, members))
    freqs = inverse_frequencies(case.config("head_dim"), case.config("rope_theta"))
    if "q" not in case.inputs:
        yield "merged", requested(case, result)
        return
    yield (
        "reference",
        requested(case, result | rotated(case, reference_rotation(merged.ids, freqs, sections, members))),
    )
    if all(s % members == 0 for s in sections):  # there the scheme is what the reference does
        scheme = create_scheme("ppe", k=members, sections=sections)
        yield "scheme", rotated(case, rotation(merged.ids, freqs, scheme.allocation(len(freqs))))
