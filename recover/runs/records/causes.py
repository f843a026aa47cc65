"""Why a rank ended: the first rule that fits what is known of it (a line of `job.jsonl`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from recover.runs.records.kinds import WRONG_RESULTS, Line
from recover.world.census import BROKEN_LINK

# Exceptions that all survivors raise: consequences of an earlier loss.
AGREED = ("PoisonedSampleError", "StateDivergedError", "CorruptGradientError")
_XIDS = {
    13: "a fault in a kernel",
    31: "an access to memory that is not its own",
    43: "a kernel was stopped, by an assertion or a fault of its own",
    45: "its channel was taken down after another error",
    48: "an ECC error of two bits",
    63: "a row of memory was replaced",
    64: "a row of memory could not be replaced",
    74: "an NVLink error",
    79: "the GPU has fallen off the bus",
    94: "a contained ECC error",
    95: "an uncontained ECC error",
    119: "the GPU's own processor does not answer",
}
_OF_PROGRAMS = (13, 31, 43, 45)  # Xid numbers that a kernel of the program usually causes


@dataclass(frozen=True)
class Cause:
    """Why one rank ended: in a few words, in a sentence, and what to do about it."""

    kind: str
    short: str
    text: str
    advice: str


@dataclass
class Launched:
    """The records of one launch of a job."""

    number: int
    start: Line
    exits: list[Line] = field(default_factory=list)
    heard: dict[int, Line] = field(default_factory=dict)  # by rank: what another host's agent reported
    ending: float = float("inf")  # when the launcher began to end the remaining ranks

    @property
    def replica_size(self) -> int:
        return int(self.start.get("replica_size", 1))


def lost_host(line: Line) -> str:
    """The host that a rank was lost with; "" if it was lost by itself."""
    heard = line.get("heard", {})
    return str(heard["host"]) if "lease" in heard else ""


def is_orphan(line: Line) -> bool:
    return line.get("words", {}).get("end") == "orphan"


def cause_of(line: Line, launch: Launched, all_lines: Sequence[Line]) -> Cause:
    for rule in _RULES:
        if (cause := rule(line, launch, all_lines)) is not None:
            return cause
    return _unknown(line)


def _left_on_notice(line: Line, *_: object) -> Cause | None:
    """A host that leaves at once takes its replicas along in the midst of a step, as if it had died."""
    said = (
        _detail(line) if line.get("words", {}).get("end") == "left" else line.get("heard", {}).get("why", "")
    )
    if not said.startswith("left on notice"):
        return None
    return Cause(
        "notice",
        said.partition(",")[0],
        f"its host was asked to leave the job: it {said}",
        "nothing, if that was meant; for a host to leave after its step, ask it once, and give it time (--grace)",
    )


def _lost_with_its_host(line: Line, launch: Launched, all_lines: Sequence[Line]) -> Cause | None:
    if not (host := lost_host(line)):
        return None
    ranks = sorted(each["rank"] for each in all_lines if lost_host(each) == host)
    if line["rank"] != ranks[0]:
        return Cause("host", f"was on {host}, too", f"it was on host {host}, too", "nothing: it followed")
    return Cause(
        "host",
        f"was on host {host}, which was lost",
        f"host {host} was lost, with {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}: there was "
        f"no sign of it for its lease of {line['heard']['lease']:g} s, so it has no power, no network, or "
        "no agent any more (killed, or stopped)",
        f"look at {host}: does it run, do the others reach it, what do its kernel's and its console's logs say; a job "
        "with --return takes it back when the same command is started there again",
    )


def _heard_of(line: Line, *_: object) -> Cause | None:
    """A rank of which only the report of another host's agent is known."""
    heard = line.get("heard")
    if heard is None or set(line) > {"rank", "at", "heard"}:
        return None
    return Cause(
        "elsewhere",
        f"was lost on {heard['host']}",
        f"it was on host {heard['host']}"
        + (f", whose agent said: {heard['why']}" if heard.get("why") else ""),
        f"its log and `recover why` on {heard['host']} tell more, in the run directory of that host",
    )


def _orphaned(line: Line, *_: object) -> Cause | None:
    if not is_orphan(line):
        return None
    return Cause("orphan", "left with its replica", f"it left: {_detail(line)}", "nothing: it followed")


def _out_of_memory(line: Line, *_: object) -> Cause | None:
    said = next((text for text in line.get("kernel", ()) if "Killed process" in text), "")
    counted = line.get("oom_kills") and line.get("signal", "SIGKILL") == "SIGKILL" and not line.get("words")
    if not said and not counted:
        return None
    proof = f'the kernel said "{said}"' if said else "its control group counts an OOM kill at that moment"
    return Cause(
        "oom",
        "killed by the OOM killer",
        f"the kernel's OOM killer ended it, for the host or its control group had no memory left: {proof}",
        "give the job more memory, or let it need less: smaller microbatches, fewer ranks on a host, a data loader "
        "that does not leak",
    )


def _gpu_failed(line: Line, *_: object) -> Cause | None:
    """The kernel's log names the process. The GPU's own report counts only for a rank that crashed, or whose exception
    is typical of a GPU failure."""
    said = [text for text in line.get("kernel", ()) if "Xid" in text and _is_of(line, text)]
    words = line.get("words", {})
    if re.search("CUDA|NCCL|Accelerator|cuda", f"{words.get('kind')} {_detail(line)}") or line.get("crash"):
        said += line.get("gpu", ())
    if not said:
        return None
    number = re.search(r"Xid(?: \([^)]*\))?:? (\d+)", said[-1])
    meaning = _XIDS.get(int(number[1]), "") if number else ""
    told = f" It said: {_detail(line)}{_place(line)}." if words else ""
    proof = f"{'; '.join(said)}{f' ({meaning})' if meaning else ''}.{told}"
    if number and int(number[1]) in _OF_PROGRAMS:
        return Cause(
            "gpu-program",
            f"faulted on its GPU (Xid {number[1]})",
            f"a kernel that it ran was ended by its GPU: {proof}",
            "the program is at fault, most often: run it under compute-sanitizer, or with CUDA_LAUNCH_BLOCKING=1; if "
            "several programs fault on this card, drain it",
        )
    return Cause(
        "gpu",
        f"lost its GPU ({f'Xid {number[1]}' if number else said[-1]})",
        f"its GPU failed: {proof}",
        "look the Xid up in NVIDIA's list; drain the card if it comes again",
    )


def _is_of(line: Line, text: str) -> bool:
    """Whether a line of the kernel names this process, or none at all."""
    named = re.search(r"pid='?(\d+)", text)
    return named is None or int(named[1]) == line.get("pid")


def _memory_failed(line: Line, *_: object) -> Cause | None:
    said = [text for text in line.get("kernel", ()) if re.search("Hardware Error|mce: |EDAC", text)]
    if not said:
        return None
    return Cause(
        "hardware", "hit by a hardware error", f"the host reported {'; '.join(said)}", "drain this host"
    )


def _disk_full(line: Line, *_: object) -> Cause | None:
    if "Errno 28" not in _detail(line) and "No space left" not in _detail(line):
        return None
    where = f", and {line['disk_full']} has no room" if line.get("disk_full") else ""
    return Cause(
        "disk-full",
        "found the disk full",
        f"it could not write: {_detail(line)}{_place(line)}{where}",
        "make room (old checkpoints, logs), or give a --run-dir on a larger disk",
    )


def _poisoned(line: Line, launch: Launched, all_lines: Sequence[Line]) -> Cause | None:
    note = line.get("note") or {}
    mine = {tuple(suspect) for suspect in note.get("suspects", ())}
    other = {
        tuple(suspect)
        for each in all_lines
        if each["rank"] // launch.replica_size != line["rank"] // launch.replica_size
        for suspect in (each.get("note") or {}).get("suspects", ())
    }
    if line.get("words", {}).get("kind") in AGREED:
        return Cause(
            "agreed",
            "ended as all agreed",
            f"it ended as all survivors did: {_detail(line)}",
            "fix the first cause",
        )
    if not mine:
        return None
    shared = sorted(mine & other)
    slot, sample = (shared or sorted(mine))[0]
    what = f"slot {slot} of step {note.get('step')} (sample {sample})"
    if shared:
        return Cause(
            "poison",
            f"broken by sample {sample}",
            f"{what} breaks every replica that computes it: {_detail(line) or note.get('why', '')}{_place(line)}",
            "fix or skip this sample; the run goes on from its last checkpoint",
        )
    return None


def _lost_connection(line: Line, *_: object) -> Cause | None:
    """The kernel closes a connection inside a replica whose other end does not answer for the link timeout."""
    if (peer := re.search(r"gloo.*\[([^][]+)\]:\d+: Connection timed out", _detail(line))) is None:
        return None
    return Cause(
        "link",
        f"no longer reached {peer[1]}",
        f"its connection to a rank of its own replica, at {peer[1]}, was lost: nothing was acknowledged for the link "
        "timeout",
        _BAD_NETWORK,
    )


def _raised(line: Line, *_: object) -> Cause | None:
    words, note = line.get("words", {}), line.get("note") or {}
    if words.get("end") != "raised":
        return None
    over = "".join(f", over slot {slot} (sample {sample})" for slot, sample in note.get("suspects", ())[:1])
    kind = words.get("kind", "an exception")
    advice = "read its log for the whole traceback"
    if "OutOfMemoryError" in kind or "CUDA out of memory" in _detail(line):
        advice = "its GPU's memory was full: smaller microbatches, recompute=true, or more ranks per replica"
    elif kind == "MemoryError":
        advice = "the host's memory was full: smaller microbatches, or fewer ranks on a host"
    return Cause(
        "raised", f"raised {kind}", f"its own code raised {_detail(line)}{_place(line)}{over}", advice
    )


def _fenced(line: Line, *_: object) -> Cause | None:
    words = line.get("words", {})
    if words.get("end") != "fenced":
        return None
    stopped = "has been stopped" in _detail(line)
    return Cause(
        "stopped" if stopped else "hung",
        f"{'was stopped' if stopped else 'hung'}, and was fenced",
        f"its peers ended it: {_detail(line)}",
        "find what sent it SIGSTOP: a debugger, a scheduler that suspends jobs, a person"
        if stopped
        else "its log says where it was; a device or a file system that does not answer is usual",
    )


def _excluded(line: Line, *_: object) -> Cause | None:
    if line.get("words", {}).get("end") != "excluded" and not line.get("evicted"):
        return None
    why = eviction(line) or _detail(line)
    return Cause(
        "link" if why.startswith(BROKEN_LINK) else "excluded",
        f"was evicted: {why}",
        f"the others evicted it: {why}",
        _advice_after_eviction(why),
    )


def eviction(line: Line) -> str:
    """Why the other replicas evicted the rank, from its own message or from their records; "" if they did not."""
    said = re.search(r"was evicted: (.*?)(; the members are now .*)?$", _detail(line))
    return said[1] if said else str(line.get("evicted", ""))


_BAD_MEMORY = (
    "test the memory of this host, and its GPU: a bit that flips by itself is usual; if it happens to a replica that "
    "has joined, to code that runs on it alone"
)
_BAD_NETWORK = (
    "look at the network between the hosts of these ranks: cables, switches, routes, firewalls "
    "(`recover doctor --hosts`); with --return the replica joins again once the link works"
)
_BAD_DEVICE = (
    "test the device (GPU or CPU and its memory) of this slot: it computed wrong gradients, or added them wrongly; its "
    "slot is not used again before its file in set-aside/ of the run directory is removed"
)
_NOT_GIVEN = (
    "let all replicas set it alike, from what a committed step tells (step.index, step.loss); if the replica has "
    "joined, give recover.Step the rest of the state of your loop (scheduler=, extra=)"
)


def _advice_after_eviction(why: str) -> str:
    if why.startswith(("its parameters", "its buffers", "its optimizer state", "its state")):
        return _BAD_MEMORY
    if why.startswith(BROKEN_LINK):
        return _BAD_NETWORK
    if why.startswith(WRONG_RESULTS):
        return _BAD_DEVICE
    if "the others have" in why or why.startswith(("its scheduler", "its extra state", "it trains")):
        return _NOT_GIVEN
    return "its log, and those of the others, tell more"


def _scheduled(line: Line, launch: Launched, *_: object) -> Cause | None:
    if line.get("words", {}).get("kind") not in (None, "ScheduledFault"):
        return None
    replica, local = divmod(line["rank"], launch.replica_size)
    for text in launch.start.get("faults", ()):
        place, action = str(text).partition("=")[::2]
        when, whom = place.split(":")[:2]
        if whom not in (f"{replica}.{local}", f"{replica}" if local == 0 else ""):
            continue
        step = line.get("step", 0)  # 0: it died between two steps
        if when.isdigit() and step not in (int(when), 0) and not action.startswith(("corrupt", "errs")):
            continue
        why = eviction(line)
        erred = why.startswith(WRONG_RESULTS) and action.startswith(("corrupt", "errs"))
        if action in ("", "kill", "exit", "stop", "corrupt:weights") or erred:
            return Cause(
                "scheduled",
                f"struck as scheduled ({text})",
                f"the schedule of faults said so: {text}{f'; it was evicted: {why}' if why else ''}",
                "nothing: it was asked for",
            )
    return None


def _crashed(line: Line, *_: object) -> Cause | None:
    signal, crash = line.get("signal", ""), line.get("crash", "")
    if not crash and signal not in ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL"):
        return None
    what = signal or crash.splitlines()[0].removeprefix("Fatal Python error: ")
    where = "\n".join(crash.splitlines()[1:])
    return Cause(
        "crashed",
        f"crashed ({what})",
        f"native code crashed under it ({what})" + (f":\n{where}" if where else ", and it left no stack"),
        "a fault in an extension, a driver or a library: the stack names the Python line above it",
    )


def _killed(line: Line, *_: object) -> Cause | None:
    signal = line.get("signal")
    if signal is None or line.get("words"):
        return None
    return Cause(
        "killed",
        f"killed by {signal}",
        f"somebody outside of the job sent it {signal}: it left no last words and no crash, and the kernel reported "
        "no lack of memory",
        "find what kills processes on this host: a person, a scheduler, a health check, earlyoom or systemd-oomd",
    )


def _left(line: Line, *_: object) -> Cause | None:
    words, code = line.get("words", {}), line.get("code")
    if words.get("kind") == "os._exit":
        how = "left by os._exit"
        text = f"{_detail(line)}: its log has the stack"
    elif code is not None and not words:
        how = f"left with exit code {code}"
        text = f"it {how} and without last words: a library's own exit"
    else:
        return None
    return Cause(
        "left",
        how,
        text,
        "look for an exit of the process in its code and its libraries",
    )


def _unknown(line: Line) -> Cause:
    known = [f"{name}: {line[name]}" for name in ("signal", "code", "disk_full") if line.get(name)]
    if line.get("words"):
        known.append(_detail(line))
    if "at" not in line:
        known.append("its end was not seen: it was on another host, or its launcher was gone")
    elif not known:
        known.append("no last words, no crash, no exit status (Linux before 6.15 does not tell it)")
    return Cause(
        "unknown", "lost, cause unknown", f"unknown; {'; '.join(known)}", "its log may say what it did last"
    )


# Evidence of others comes before what the rank itself believed.
_RULES: tuple[Callable[[Line, Launched, Sequence[Line]], Cause | None], ...] = (
    _left_on_notice,
    _lost_with_its_host,
    _orphaned,
    _out_of_memory,
    _gpu_failed,
    _memory_failed,
    _disk_full,
    _poisoned,
    _scheduled,
    _fenced,
    _left,
    _lost_connection,
    _raised,
    _excluded,
    _crashed,
    _killed,
    _heard_of,
)


def _detail(line: Line) -> str:
    return str(line.get("words", {}).get("detail", ""))


def _place(line: Line) -> str:
    place = line.get("words", {}).get("place")
    return f", at {place}" if place else ""
