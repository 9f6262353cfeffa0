"""A language model that learns: loading, log-probabilities, updates, sampling."""
