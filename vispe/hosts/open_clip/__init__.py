"""Vision towers of open_clip."""

from vispe.hosts.contracts.check import check_contracts_of

check_contracts_of("open_clip", "timm")  # before modules of this package import these names
