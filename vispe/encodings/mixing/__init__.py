"""Kind mixing: neighbouring tokens are mixed, or nothing at all is done."""
