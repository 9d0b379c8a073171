"""Models whose attention layers have their own grids: windows, stages, or one fixed grid."""
