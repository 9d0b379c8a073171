"""SeqPE: digits of positions, their encoder and its auxiliary losses (arXiv 2506.13277)."""
