"""What files hold: decoders, claims that are checked before memory is asked for, and damage."""
