"""Models in local folders: results of `vispe retrofit`, models of transformers."""
