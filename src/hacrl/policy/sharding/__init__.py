"""One agent over several devices: its weights in shards, and the processes that hold them."""
