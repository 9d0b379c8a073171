"""Principal components of tokens, the input of the classifier."""

from dataclasses import dataclass

import numpy as np

_FIT_TOKENS = 50_000  # sampled from all maps, to bound time and memory


@dataclass(frozen=True, eq=False)
class TokenBasis:
    """Principal components of tokens, standardised: (tokens - mean) @ components.T / scale."""

    mean: np.ndarray  # (d,)
    components: np.ndarray  # (m, d)
    scale: np.ndarray  # (m,)

    @classmethod
    def fit(cls, maps: list[np.ndarray], components: int, seed: int) -> "TokenBasis":
        """Fit to at most 50 000 of the tokens in `maps`; the largest loading of each component is positive."""
        from sklearn.decomposition import PCA

        flat = [m.reshape(-1, m.shape[-1]) for m in maps]
        stops = np.cumsum([len(tokens_of_map) for tokens_of_map in flat])
        if stops[-1] > _FIT_TOKENS:
            # sample each map separately: concatenating all tokens would copy them
            sampled = np.sort(np.random.default_rng(seed).permutation(stops[-1])[:_FIT_TOKENS])
            parts = np.split(sampled, np.searchsorted(sampled, stops[:-1]))
            starts = stops - [len(tokens_of_map) for tokens_of_map in flat]
            flat = [
                tokens_of_map[part - start]
                for tokens_of_map, part, start in zip(flat, parts, starts, strict=True)
            ]
        tokens = np.concatenate(flat)
        count = min(components, len(tokens), tokens.shape[1])
        # equal tokens, or a single one, have zero variance
        with np.errstate(invalid="ignore", divide="ignore"):
            pca = PCA(count, svd_solver="full").fit(tokens.astype(np.float64))
        largest = np.take_along_axis(pca.components_, np.abs(pca.components_).argmax(1)[:, None], 1)
        oriented = pca.components_ * np.where(largest < 0, -1, 1)
        spread = np.sqrt(np.nan_to_num(pca.explained_variance_))
        scale = np.where(spread > 1e-6 * max(spread.max(initial=0), 1e-12), spread, 1)
        return cls(*(np.ascontiguousarray(a, np.float32) for a in (pca.mean_, oriented, scale)))

    def project(self, tokens: np.ndarray) -> np.ndarray:
        """Project tokens (..., d) to components (..., m) float32."""
        return ((tokens - self.mean) @ self.components.T / self.scale).astype(np.float32)

    def tensors(self) -> dict[str, np.ndarray]:
        """Return the arrays of a model file, by name."""
        return {"mean": self.mean, "components": self.components, "scale": self.scale}
