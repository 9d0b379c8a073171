"""Golden cases of frequency schedules. The references compute cos and sin with concatenated halves, in float32."""

import torch

from vispe.grid import frequencies as fr
from vispe.grid import longrope, yarn

MADE = {
    "max_position_embeddings": "how many positions the reference caches",
    "finetuned": "the reference reads it nowhere",
    "randomize": "moves positions while the reference trains, not its frequencies",
    "device": "where the reference was run",
    "seed": "how the case was made",
}  # arguments of the references without effect on what is compared


def run(case):
    yield "float32", ROUTES[case.config("method")](case)


def _ignore(case, *names):
    for key in MADE.keys() - set(names):
        case.ignore(key, MADE[key])


def _tables(case, freqs, mscale=1.0):
    if "cos" not in case.output_names:
        return {}
    cos, sin = fr.rotary_tables(freqs, case.input("pos"), mscale)
    return {"cos": cos, "sin": sin}


def _yarn(case):
    dim, base, scale = case.config("dim"), case.config("base", 10000), case.config("scale", 1)
    length = case.config("original_max_position_embeddings", 2048)
    _ignore(case)
    fast, slow = case.config("beta_fast", 32), case.config("beta_slow", 1)
    options = {"beta_fast": fast, "beta_slow": slow, "extrapolation": case.config("extrapolation_factor", 1)}
    freqs = yarn.yarn(dim, base, scale, length, **options)
    mscale = yarn.yarn_mscale(scale, case.config("attn_factor", 1))
    bounds = torch.tensor(yarn.wavelength_range(fast, slow, dim, base, length))
    return _asked(case, inv_freq=freqs, low_high=bounds, mscale=mscale, **_tables(case, freqs, mscale))


def _part_ntk(case):
    dim, base, scale = case.config("dim"), case.config("base", 10000), case.config("scale", 1)
    _ignore(case)
    freqs = yarn.ntk_by_parts(
        dim,
        base,
        scale,
        case.config("original_max_position_embeddings", 2048),
        ntk=case.config("ntk_factor", 1),
        extrapolation=case.config("extrapolation_factor", 1),
    )
    return _asked(case, inv_freq=freqs, ntk_base=fr.ntk_base(base, scale, dim), **_tables(case, freqs))


def _longrope(case, dynamic=False):
    dim, base = case.config("dim"), case.config("base", 10000)
    trained, longest = (
        case.config("original_max_position_embeddings"),
        case.config("max_position_embeddings"),
    )
    _ignore(case, "max_position_embeddings")
    case.ignore("scale", "the reference takes the ratio of the two lengths")
    case.ignore("model_type", "how the reference is called")
    factors, length = case.param("rescale_factors"), case.config("seq_len", longest)
    if dynamic:  # the reference goes on below the trained length
        factors = longrope.longrope_factors(factors, length, trained, longest, clamp=False)
    freqs = longrope.longrope(dim, base, factors)
    mscale = longrope.longrope_mscale(case.config("policy", "su"), longest / trained, trained)
    return _asked(case, inv_freq=freqs, mscale=mscale, **_tables(case, freqs, mscale))


def _giraffe(case):
    freqs = fr.giraffe(
        case.config("dim"),
        case.config("base", 10000),
        scale=case.config("scale", 1.0),
        power=case.config("scale_power", 0.0),
        truncate=case.config("truncate", 0) or 0,
    )
    _ignore(case)
    return _asked(case, inv_freq=freqs, **_tables(case, freqs))


def _ms_poe(case):
    _ignore(case, "max_position_embeddings")
    ratios = fr.ms_poe_ratios(
        case.config("num_heads"), case.config("min_cratio", 1.2), case.config("max_cratio", 1.8)
    )
    positions = torch.arange(case.config("max_position_embeddings"), dtype=torch.float32) / ratios[:, None]
    freqs = fr.inverse_frequencies(case.config("dim"), case.config("base", 10000))
    cos, sin = fr.rotary_tables(freqs, positions)
    return _asked(case, inv_freq=freqs, cos=cos, sin=sin)


def _plain(case):
    freqs = fr.inverse_frequencies(case.config("dim"), case.config("base", 10000))
    return _asked(case, inv_freq=freqs, **_tables(case, freqs))


def _linear(case):
    freqs = fr.interpolated(
        fr.inverse_frequencies(case.config("dim"), case.config("base", 10000)), case.config("scale")
    )
    return _asked(case, inv_freq=freqs, **_tables(case, freqs))


def _ntk(case):
    dim = case.config("dim")
    base = fr.ntk_base(case.config("base", 10000), case.config("scale"), dim)
    freqs = fr.inverse_frequencies(dim, base)
    return _asked(case, inv_freq=freqs, ntk_base=base, **_tables(case, freqs))


def _asked(case, **result):
    return {name: value for name, value in result.items() if name in case.output_names}


ROUTES = {
    "yarn": _yarn,
    "part_ntk": _part_ntk,
    "longrope": _longrope,
    "longrope_dynamic": lambda case: _longrope(case, dynamic=True),
    "giraffe": _giraffe,
    "mspoe": _ms_poe,
    "rope": _plain,
    "pi": _linear,
    "ntk": _ntk,
}
