"""Zero-cost proxies: scores of untrained networks, one file per idea, and the engine that runs them together."""
