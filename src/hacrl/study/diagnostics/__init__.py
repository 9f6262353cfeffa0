"""Theory checks during training: one check every `diagnostics.every` steps (docs/diagnostics.md).

check.py      one check of one learner; the hooks that training calls
baseline.py   bias and variance of the baselines
gradients.py  gradients of a step by source, and how far they move the weights
gain.py       first-order gain on held-out problems by source
"""
