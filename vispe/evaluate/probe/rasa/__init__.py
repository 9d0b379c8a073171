"""RASA: iterative removal of linear position from patch features (Franca, arXiv 2507.14137)."""
