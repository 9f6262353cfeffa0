"""Writing replies: the built-in sampler with its caches and kernels, and vLLM."""
