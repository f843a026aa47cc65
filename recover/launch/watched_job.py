"""A job as those see it who started its ranks: what crashed, who stands where, and what became of it in the end."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from recover.job.output import say
from recover.job.record_files import FILES
from recover.job.spec import JobSpec
from recover.launch.announcements import Teller
from recover.launch.output_relay import Relay
from recover.launch.verdict import EndOfRank, Verdict, name_ranks
from recover.world.rank_exit import STACK_SIGNAL

RAISED = 4  # exit code: a rank raised outside of any step, where nobody makes good what it left undone
_ANSWER = 1.0  # seconds that the ranks get to write their stacks


class WatchedJob:
    def __init__(self, spec: JobSpec, relay: Relay) -> None:
        assert spec.run_dir is not None
        self.ranks, self.replica_size, self.run_dir = spec.ranks, spec.replica_size, Path(spec.run_dir)
        self.relay = relay
        self.everyone = set(range(spec.ranks))  # and those who have joined
        self.ended: set[int] = set()  # ranks that ended by themselves
        self.known: dict[int, EndOfRank] = {}  # what those of them have left that has been read
        self.crashed: set[int] = set()  # ranks whose crash was shown
        self.teller: Teller | None = None

    def verdict(self) -> Verdict:
        """As things are. Who has ended leaves nothing more, and is read once: over weeks there are thousands."""
        verdict = Verdict(self.run_dir, self.everyone, known=self.known)
        self.known.update((rank, verdict.left[rank]) for rank in self.ended.difference(self.known))
        return verdict

    def judge(self, failure: str) -> int:
        """Say what became of the job; `failure` is what is known already to have gone wrong."""
        unfinished = self.everyone - self.ended if failure else ()
        verdict = Verdict(self.run_dir, self.everyone, unfinished)
        self.tell(verdict, (), at_end=True)
        self.show_crashes(verdict, verdict.silent)
        for path in verdict.directory.glob("*.stack"):
            if FILES.read(path) == b"":
                FILES.remove(path)
        if not failure and not verdict.done:
            failure = "no rank finished"
        repeated = verdict.repeated(self.replica_size)
        logs = f"(logs in {verdict.directory})"
        if failure:
            say(f"failed, {repeated or failure}; {verdict.losses()} {logs}")
            return RAISED if repeated else 1
        if verdict.lost:
            unmade = f"; but {verdict.unmade()}" if verdict.raised else ""
            say(f"done on {name_ranks(verdict.done)}; lost: {verdict.losses()}{unmade} {logs}")
        return RAISED if verdict.raised else 0

    def tell(self, verdict: Verdict, pids: Sequence[int], at_end: bool = False) -> None:
        if self.teller is not None:
            losses = [] if at_end else self.teller.losses(verdict, pids)  # at the end the verdict names all
            for text in (*losses, *self.teller.repairs(at_end)):
                self.relay.end_line()
                say(text)
        if at_end:
            self.relay.end_line()

    def show_crashes(self, verdict: Verdict, among: Iterable[int]) -> None:
        """Native code that crashes leaves a stack and no words of its own."""
        for rank in set(verdict.crashed).intersection(among) - self.crashed:
            self.crashed.add(rank)
            say(f"rank {rank} crashed:\n{verdict.stack(rank)}")

    def show_stacks(self, pids: Mapping[int, int], verdict: Verdict) -> None:
        for pid in filter(None, pids.values()):
            try:
                os.kill(pid, STACK_SIGNAL)
            except ProcessLookupError:
                pass
        self.relay.drain(_ANSWER)
        for rank, pid in pids.items():
            if pid:
                text = verdict.stack(rank) or "does not answer"
            else:
                text = "has ended" if verdict.has_started(rank) else "has not started"
            say(f"rank {rank} (pid {pid or '-'}):\n{text}")
