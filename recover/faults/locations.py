"""The locations at which a fault can strike a rank.

The names are the same in code, logs and docs.
"""

from __future__ import annotations

IN_FLIGHT = 0.002  # seconds between the start of an operation and a fault that strikes it in flight

LOCATIONS: dict[str, str] = {
    "forward": "before the forward pass of a microbatch",
    "backward": "before the backward pass of a microbatch",
    "check": "before the forward pass of a microbatch that two replicas compute (verify=K), on both of them",
    "bucket": "before a gradient bucket is handed to the reduction (bucket:K for the K-th)",
    "in-reduce": "while a bucket's reduction is in flight: posted, not yet waited for (in-reduce:K)",
    "in-totals": "while the last, small reduction is in flight: loss, weights, samples and the hash of the state",
    "reduced": "after the last reduction, before the checksums of the sums are compared (verify=K with "
    "reduction=reproducible)",
    "vote": "after the last reduction, before the vote on the step",
    "repair": "inside the repair (repair:members, repair:census, repair:carrier, repair:closing; where a replica joins "
    "also repair:state, before the state is passed on, repair:in-state, while it is under way, and repair:arrived)",
    "extra": "before an extra microbatch that replaces lost work",
    "update": "after the verdict, before the optimizer changes the parameters",
    "after-update": "after the parameters have changed, before the step is counted",
    "advance": "between two steps, while the next layout is installed",
    "checkpoint": "while a checkpoint is being written",
    "instalment": "before a part of the state is handed over with a step (join=instalments), on both sides",
    "in-instalment": "while a part of the state is under way with a step (join=instalments)",
    "warm-up": "one that is to join, before the microbatch that it runs to get ready",
    "ask": "one that is to join, while it asks for it",
}
ANYTIME = "anytime"  # in place of a location, for faults by the clock
REPAIR_PHASES = ("members", "census", "carrier", "closing")
JOIN_PHASES = ("state", "in-state", "arrived")  # of a repair in which a replica joins
OUTSIDE = ("warm-up", "ask")  # reached only by a joining rank
IN_INSTALMENTS = ("instalment", "in-instalment")  # reached only with join=instalments, while a replica joins
VERIFIED = ("check", "reduced")  # reached only with verify=K
CHECKED_SUMS = ("reduced",)  # of these, reached only with reproducible sums
NUMBERED = ("bucket", "in-reduce")
OF_MICROBATCHES = ("forward", "backward", "extra")  # reached only by a replica with microbatches
IN_RECOVERY = ("repair", "extra")  # reached only in a step that loses another replica
AFTER_VERDICT = ("update", "after-update", "advance", "checkpoint")  # a loss here is found in the next step
