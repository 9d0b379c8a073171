"""Files, checks of options, reports and the version, used by all packages."""
