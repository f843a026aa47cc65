"""For models that are already wrapped in DDP or FSDP1; the paper's primitives; torch backend
"ulfm". Nothing in the core imports this package.

Importing this package registers the backend:

    import recover, recover.dropin
    recover.init()
    torch.distributed.init_process_group("ulfm")
"""

from recover.dropin.ddp import DDPGradients, ddp_comm_hook
from recover.dropin.fsdp import FSDPGradients
from recover.dropin.primitives import FailureRecord, WorkULFM, ulfm_allreduce, ulfm_consensus
from recover.dropin.process_group import ProcessGroupULFM
from recover.parallel.torch_world import init_replica_world

__all__ = [
    "DDPGradients",
    "FSDPGradients",
    "FailureRecord",
    "ProcessGroupULFM",
    "WorkULFM",
    "ddp_comm_hook",
    "init_replica_world",
    "ulfm_allreduce",
    "ulfm_consensus",
]
