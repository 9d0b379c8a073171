"""Golden cases of the SVD debias baseline."""

from vispe.evaluate.probe.linear_debiasing import svd_debias


def run(case):
    case.ignore("default_svd_components", "states the default; the case uses svd_components")
    feats = case.input("feats").reshape([case.config(key) for key in ("B", "C", "h", "w")])
    noise = case.input("noise_feats")
    k = case.config("svd_components")
    yield "tensor", {"feats": svd_debias(feats, noise, k=k)}
    yield "array", {"feats": svd_debias(feats.numpy(), noise.numpy(), k=k)}
