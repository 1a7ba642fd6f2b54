"""Write a pipeline step in Chrome's trace format, for chrome://tracing and Perfetto.

Public as ``pipeline.chrome_trace``; `PipelineTimeline` writes a file with it. Chrome's format is fixed; names of tracks may change.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from arclight.fabric.atomic_replace import replace_text
from arclight.parallel.pipeline.runtime.recording import Recording
from arclight.parallel.pipeline.schedule.step_trace import Trace, by_process, source

_NAMES = {"F": "forward", "B": "backward", "I": "backward_inputs", "W": "backward_weights"}
_COLOURS = {"F": "thread_state_running", "B": "terrible", "I": "thread_state_iowait", "W": "good"}
"""Names that Chrome has for colours."""


def chrome_trace(run: Recording | Trace, file: str | Path = "trace.json", predicted: Trace | None = None) -> Path:
    """Write a step as Chrome trace events: threads of processes, arrows, and memory.

    There is a thread for each process of the pipeline.
    run: what was recorded (its training step of median length), or one step. predicted: the same step as simulated, as a
    process of its own. Of the processes of a recording the first of all writes. Gives the file's path. The format is that
    of the document "Trace Event Format".
    """
    path = Path(file)
    trace = run.typical if isinstance(run, Recording) else run
    if isinstance(run, Recording) and not run.first:
        return path
    events = list(_events(trace, 0, f"{trace.schedule}, measured" if predicted is not None else trace.schedule))
    if predicted is not None:
        events += _events(predicted, 1, f"{predicted.schedule}, predicted")
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, allow_nan=False)
    replace_text(path, text, durable=False)
    return path


def _events(trace: Trace, process: int, name: str) -> Iterator[dict[str, Any]]:
    begin = min(span.start for span in trace.spans)
    spans = {span.action: span for span in trace.spans}
    weighed = any(span.live for span in trace.spans)
    yield _named("process_name", process, 0, name)
    for rank, lane in enumerate(by_process(trace)):
        stages = sorted({span.action.stage for span in lane})
        yield _named("thread_name", process, rank, f"rank {rank}, stage {', '.join(map(str, stages))}")
        yield {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": rank, "args": {"sort_index": rank}}
    for number, span in enumerate(sorted(trace.spans, key=lambda span: span.start)):
        action, start, end = span.action, (span.start - begin) * 1e6, (span.end - begin) * 1e6
        where = {"pid": process, "tid": span.rank}
        arguments: dict[str, float] = {
            "stage": action.stage,
            "micro_batch": action.micro_batch,
            "live_bytes": span.live,
        }
        if action in trace.waits:
            arguments["waited_us"] = round(trace.waits[action] * 1e6, 3)
        yield {
            "ph": "X", "name": str(action), "cat": _NAMES[action.kind], "cname": _COLOURS[action.kind],
            "ts": start, "dur": end - start, "args": arguments, **where,
        }  # fmt: skip
        if weighed:
            yield {
                "ph": "C",
                "name": f"activations of rank {span.rank}",
                "ts": end,
                "args": {"bytes": span.live},
                **where,
            }
        before = source(action, trace, spans)
        if before is not None and before.rank != span.rank:
            flow = {
                "name": "activation" if action.kind == "F" else "gradient",
                "cat": "transfer",
                "id": f"{process}.{number}",
            }
            # An arrow belongs to the slice that its time lies in, so it starts just before the sender's end.
            sent = (before.start + 0.999 * (before.end - before.start) - begin) * 1e6
            yield {"ph": "s", "ts": sent, "pid": process, "tid": before.rank, **flow}
            yield {"ph": "f", "bp": "e", "ts": start, **where, **flow}


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
