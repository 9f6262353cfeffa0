"""The process of a follower: `python -m hacrl.policy.sharding SPEC PARENT_PID BIND`."""

import sys

from hacrl.stopping import end_with_parent

if __name__ == "__main__":
    spec, parent, bind = sys.argv[1:]
    end_with_parent(int(parent), bind=bool(int(bind)))  # also while torch is being imported
    from hacrl.policy.sharding.followers import main

    main(spec)
