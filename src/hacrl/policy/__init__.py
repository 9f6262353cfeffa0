"""A model that scores, samples and learns.

policy.py      START HERE. Policy: score, update, checkpoint and restore, offload
gradients.py   one minibatch: micro-batches through forward, loss and backward
update.py      UpdateReport, and the loss of a step's first update
weights.py     a model on its device with its float32 master
ranks.py       the seam for sharding: one rank by default; sharding/ has several
load.py  lora.py  offload.py        loading, adapters, host memory between updates
microbatch.py  batch.py             planning of micro-batches, and their tensors
logprobs.py  fast_paths.py          log-probabilities, and checks of the faster ways to them
packing.py  head.py  fuse.py  attention.py  *_kernels.py     those faster ways
"""
