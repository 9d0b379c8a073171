"""How an encoding enters a model that exists: one file per family of hosts."""
