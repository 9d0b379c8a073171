"""Golden cases of the positional linear probe: ramps, sampling masks, and fits on given features."""

from vispe.evaluate.probe.fit import channel_r2, fit_probe
from vispe.evaluate.probe.regression_data import Fit
from vispe.evaluate.probe.targets import n_random_samples, ramp, sample_mask, sample_region


def run(case):
    shape = (case.config("h"), case.config("w"))
    if "feats" in case.inputs:
        yield from _fits(case, shape)
    elif "ramp_type" in case.settings:
        yield "mask", _sampling(case, shape)
    else:
        yield "ramps", {name: ramp(name.replace("_", "+"), shape) for name in case.output_names}


def _sampling(case, shape):
    target, step, cutoff = case.config("ramp_type"), case.config("step"), case.config("cutoff_frac")
    region = sample_region(target, shape, cutoff)
    mask = sample_mask(target, shape, step=step, cutoff=cutoff, random=case.config("random_mask"))
    return {
        "mask": mask,
        "n_random_samples": n_random_samples(region, step),
        "region_y0_y1_x0_x1": region,
    }


def _fits(case, shape):
    feats = case.input("feats").reshape(*shape, case.config("channels"))
    values = ramp(case.config("ramp_type"), shape)
    masks = {"stored mask": case.input("mask")}
    if case.config("random_mask"):
        for key in ("step", "cutoff_frac"):
            case.ignore(key, "the random draw is stored in in.mask")
    else:
        masks["own mask"] = _sampling(case, shape)["mask"]
    keys = ("regressor", "ridge_alpha", "scale_feats", "fit_intercept", "nan_to_zero")
    options = Fit(*map(case.config, keys))
    for label, mask in masks.items():
        fit = fit_probe(feats, mask, {"target": values}, options)["target"]
        outputs = {"pred": fit.prediction, "r2": fit.r2}
        if "channel_r2" in case.output_names:
            outputs["channel_r2"] = channel_r2(feats, mask, values, options)
        yield label, outputs
