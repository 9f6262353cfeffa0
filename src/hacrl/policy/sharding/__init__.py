"""One agent over several processes ("ranks"): weights sharded by FSDP2, replies sampled by all ranks.

followers.py       starts the other ranks of this machine (on Ray: cluster/actor.py)
process_group.py   how ranks connect, and pass commands and results
sharded.py         ShardedPolicy on rank 0, and `follow` on the other ranks
fsdp.py  split.py  sharded models; how rows are split over ranks
"""
