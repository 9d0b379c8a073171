"""Objects in label maps: detection, splitting, measurement and counting."""
