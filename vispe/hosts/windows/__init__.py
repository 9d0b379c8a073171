"""An encoding in models whose attention layers have grids of their own: windows, stages, or one grid for good."""
