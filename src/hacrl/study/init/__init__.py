"""`hacrl init`: the config of an own team, made from a data file; the config's JSON schema."""
