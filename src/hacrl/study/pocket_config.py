"""The demo's config, inside the package so that `hacrl demo` runs from anywhere.

configs/pocket.toml in the repository is the same text (a test compares the two).
"""

from __future__ import annotations

POCKET_TOML = """\
# The pocket team: three tiny models of two families, with two tokenizers, that come with hacrl.
# A minute or two on a CPU:  hacrl train configs/pocket.toml
# Each agent for itself:     hacrl train configs/pocket.toml algorithm.name=gspo

steps = 18
prompts_per_step = 32
samples_per_prompt = 8
minibatch_samples = 256
max_prompt_tokens = 32
max_response_tokens = 48

[task]
kind = "arithmetic"

[verifier]
kind = "number"

[algorithm]
name = "hacpo"
# Models this small move further in one update than the paper's: the clip is ten times as wide.
epsilon_low = 3e-3
epsilon_high = 4e-3

[evaluation]
every = 0        # before the first step and after the last
problems = 300
samples = 4

[checkpoint]
every = 0        # after the last step only
keep = 1

[runtime]
device = "cpu"
threads = 1

[[agents]]
name = "wren"
model = "pocket:wren"
learning_rate = 2e-4

[[agents]]
name = "finch"
model = "pocket:finch"
learning_rate = 2e-4

[[agents]]
name = "heron"
model = "pocket:heron"
learning_rate = 2e-4
"""
