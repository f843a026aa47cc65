"""`recover train` on a Ray cluster: `python examples/ray_train.py NODES KEY=VALUE... --run-dir /shared/run`.

Run it on a node of the cluster, or submit it as a job: `ray job submit -- python examples/ray_train.py 3 ...`.
"""

import sys

import ray

from recover.integrations.ray import run

if __name__ == "__main__":
    ray.init()
    sys.exit(run(["train", *sys.argv[2:]], nodes=int(sys.argv[1])))
