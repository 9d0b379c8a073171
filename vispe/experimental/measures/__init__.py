"""Experimental measures; importing this package adds those of the audit to `vispe audit --only`."""

from vispe.experimental.measures import latent_dimensions, mlp_units, saliency

__all__ = ["latent_dimensions", "mlp_units", "saliency"]
