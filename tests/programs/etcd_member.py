"""One member of an etcd, until it is killed. Argument: a JSON object with `address`, `port`, `members`, `directory`."""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path

from recover.world.fabrics.etcd.server import EtcdServer

warnings.simplefilter("ignore")
scenario = json.loads(sys.argv[1])
directory = Path(scenario.pop("directory"))
server = EtcdServer(directory, **scenario)
server.start()
(directory / "pid").write_text(str(server.pid))
while True:
    time.sleep(3600)
