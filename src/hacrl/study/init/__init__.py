"""`hacrl init`: writes the config of a new team from a data file. `hacrl schema`: its JSON schema."""
