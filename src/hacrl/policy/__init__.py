"""A model that scores, samples and learns.

policy.py      START HERE. Policy: score, update, checkpoint and restore, offload
gradients.py   one minibatch: micro-batches through forward, loss and backward
update.py      UpdateReport, and the loss of a step's first update
ranks.py       one rank by default, which places the model on its device; sharding/ has several
weights.py     the parts of that: the float32 master, gradients, start weights
load.py  lora.py  offload.py        loading, adapters, host memory between updates
microbatch.py  batch.py             planning of micro-batches, and their tensors
logprobs.py  fast_paths.py          log-probabilities, and checks of the faster paths
packing.py  head.py  fuse.py  attention.py  *_kernels.py     the faster paths
"""
