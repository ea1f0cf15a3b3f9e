"""Remedies for causes: one edit each, and why it helps."""

from __future__ import annotations

from millstream.insight import RECEIVE_NS, Cause, Findings, Row
from millstream.report.idle.source_lines import place
from millstream.report.words import count, duration

TITLES = {
    Cause.DATA_WAIT: "Waiting for data",
    Cause.IN_PROCESS: "Making batches in the training process",
    Cause.PASS: "Starting the loader's workers again for each pass",
    Cause.SYNC: "The host waits for the device, and leaves its queue empty",
    Cause.ALLOCATOR: "Taking device memory from the driver",
    Cause.COMPILE: "Compiling again and again",
    Cause.GRAPH_BREAK: "Python between compiled parts of one function",
    Cause.GC: "Python's garbage collector",
    Cause.IO: "Writing or reading files",
    Cause.GIL: "Another thread holds Python's interpreter lock",
    Cause.DESCHEDULED: "No processor is free for the thread",
    Cause.WAITING: "The thread sleeps, or waits for a lock, a file or another process",
    Cause.PYTHON: "Python of your own",
    Cause.LAUNCH: "Calling operators and launching kernels one by one",
    Cause.GRAPH_TAIL: "Between two CUDA graphs",
    Cause.STREAM_WAIT: "One stream waits for another",
    Cause.DEVICE_GAP: "The device's own pauses",
    Cause.PROFILER: "Looking",
    Cause.UNKNOWN: "Nothing was seen",
    Cause.COPY: "Copies that nothing hides",
    Cause.COMMUNICATION: "Collectives that nothing hides",
}


_SEVERAL = 1.1  # batches a step: less is an evaluation now and then
_FEW = 0.75  # of the processors: with more, a process's own threads may be too many


def remedy(row: Row, found: Findings) -> str:
    """One or two sentences: the edit, and what was measured that speaks for it."""
    if row.cause in (Cause.DATA_WAIT, Cause.IN_PROCESS):
        return _more_workers(found)
    if row.cause is Cause.COMPILE:
        guards = [note for note in found.notes if note.cause is Cause.COMPILE]
        why = f" {count(len(guards), 'recompilation')}, the last because {guards[-1].text}." if guards else ""
        return f"torch.compile(..., dynamic=True), or inputs of few sizes (pad them).{why}"
    if row.cause is Cause.GIL:
        other = f" ({row.detail})" if row.detail else ""
        return f"Move that thread's work{other} into a process, or let it sleep between pieces."
    if row.cause is Cause.DESCHEDULED:
        return _fewer_processes(found)
    if row.cause is Cause.COPY:
        return "DataLoader(..., pin_memory=True) and .to(device, non_blocking=True), or ms.feed(loader, device)."
    return _REMEDIES.get(row.cause, "")


_REMEDIES = {
    Cause.PASS: "DataLoader(..., persistent_workers=True): they, and what they have imported and opened, stay from one "
    "pass to the next.",
    Cause.SYNC: "Keep the value on the device and read it later: value = ms.fetch(loss), or every 100 steps.",
    Cause.ALLOCATOR: "Leave out torch.cuda.empty_cache(); where memory is short, a smaller batch, or "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
    Cause.GRAPH_BREAK: "Move what breaks the graph (print, .item(), a library's call) out of the compiled function.",
    Cause.GC: "gc.freeze() after the model is built, and a higher threshold: gc.set_threshold(50_000, 20, 100). "
    "What collecting garbage takes remains, and is not counted as gained.",
    Cause.IO: "Write in a thread (copy the state first), like distributed.checkpoint.async_save, or less often.",
    Cause.WAITING: "Do it in a thread, or leave it out.",
    Cause.PYTHON: "Do it in a thread or process of its own, with tensor operations, or less often.",
    Cause.LAUNCH: "One graph of the whole step: @ms.step on it, or torch.compile(mode='reduce-overhead').",
    Cause.GRAPH_TAIL: "Capture what the two graphs do as one: @ms.step on the whole step.",
    Cause.STREAM_WAIT: "Record the event earlier, or put both pieces of work on one stream.",
    Cause.COMMUNICATION: "Whether it transfers, or waits for another rank, only the reports of all ranks tell "
    "(millstream profile --merge). Transfer: overlap it with the backward pass, or take larger batches.",
}


def _fewer_processes(found: Findings) -> str:
    looks = [each for each in found.recording.samples if each.process_ns is not None]
    ran = sum(each.process_ns or 0 for each in looks) / max(sum(each.end_ns - each.start_ns for each in looks), 1)
    cores, has_workers = found.recording.num_cores, found.loader is not None and found.loader.num_workers
    if looks and not has_workers and ran < _FEW * cores:
        return f"This process had {ran:.1f} of {count(cores, 'processor')}: others take the rest. Stop those, or wait."
    return "Fewer threads and workers (torch.set_num_threads, num_workers), or fewer other processes here."


def _per_step(found: Findings) -> str:
    number = found.batches_per_step
    return f", and a step has {number:.3g}" if number >= _SEVERAL else ""


def _more_workers(found: Findings) -> str:
    loader, needed, sensible = found.loader, found.workers_needed, found.workers_sensible
    if loader is None:
        return "Let batches be made ahead: ms.feed(loader, device), or a DataLoader with num_workers."
    if found.is_too_quick_for_workers:
        return (
            f"A batch takes {duration(found.batch_ns)} to make, and {duration(RECEIVE_NS)} or so to receive from a "
            "worker: make it in one piece (the dataset's __getitems__, or tensors indexed by whole batches), or larger."
        )
    free = duration(found.free_step_ns)
    if loader.num_workers == 0 and found.batch_ns:
        facts = f"A batch takes {duration(found.batch_ns)} to make{_per_step(found)}, the rest of a step {free}"
    elif loader.batch_ns:
        verb = "takes" if loader.num_workers == 1 else "take"
        facts = (
            f"{count(loader.num_workers, 'worker')} {verb} {duration(loader.batch_ns)} a batch, so one comes every "
            f"{duration(loader.batch_ns / max(loader.num_workers, 1))}{_per_step(found)}; "
            f"without waiting a step takes {free}"
        )
    else:
        facts = f"Without waiting a step takes {free}"
    is_own = loader.site is not None and not found.recording.is_library(loader.site.file)
    where = f" What makes an item is {place(loader.site)}." if is_own else ""
    if needed and needed <= loader.num_workers:
        return f"{facts}. The workers are fast enough: what is slow is sending batches (fewer, larger tensors).{where}"
    processors = count(found.recording.num_cores, "processor")
    if found.is_short_of_processors:
        return (
            f"{facts}. More workers would only queue for the {processors}: make an item cheaper; at half its cost a "
            f"step takes {duration(max(found.free_step_ns, found.supplied_ns))}.{where}"
        )
    edit = f"num_workers={sensible}" if needed else "more workers (num_workers)"
    if needed > sensible:
        edit += f", and a cheaper item ({needed} workers would keep up, but there are {processors})"
    return f"{facts}: {edit}.{where}"
