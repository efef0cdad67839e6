"""Words for what a run's folder holds: an event, a loss, an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vescale_ray.errors import one_line
from vescale_ray.runfolder import Record

SHOWN = 100
"""Characters of a completion that are shown."""


def loss_words(line: Mapping[str, Any], digits: int = 3) -> str:
    """Return the loss of a metrics line or of a status in words. Without a loss, say whether it is not finite or not known yet."""
    if line.get("loss") is None:
        return "none yet" if line.get("tokens_per_second") is None else "not a finite number"
    bpb = number_or_none(line.get("bpb"))
    return f"{line['loss']:.{digits}f}" + (f" ({bpb:.{digits - 1}f} bits/byte)" if bpb is not None else "")


def set_words(figures: Mapping[str, Any]) -> str:
    """Return the figures of an evaluated set as words."""
    loss, perplexity, bpb = (number_or_none(figures.get(key)) for key in ("loss", "perplexity", "bpb"))
    if loss is None:
        return "not a finite number"
    more = [*([f"perplexity {perplexity:.4g}"] if perplexity else []), *([f"{bpb:.3f} bits/byte"] if bpb is not None else [])]
    return f"{loss:.3f}" + (f" ({', '.join(more)})" if more else "")


def describe_event(event: Record) -> tuple[str, float | None] | None:
    """Return an event in a few words, and the seconds without training; None for events that only programs need."""
    told = _described(event)
    return None if told is None else (one_line(told[0]), told[1])


def _described(event: Record) -> tuple[str, float | None] | None:
    kind = event["event"]
    match kind:
        case "worker_started":
            return f"worker {event.get('worker')} started, process {event.get('pid')}", None
        case "worker_lost":
            return f"worker {event.get('worker')} lost: {event.get('reason')}", None
        case "rescaled":
            words = f"{event.get('from')} -> {event.get('to')} workers ({event.get('reason')}), state from {event.get('source')}"
            replayed = event.get("steps_replayed")
            moved, least = number_or_none(event.get("moved_bytes")), number_or_none(event.get("lower_bound_bytes"))
            words += f", {moved / 1e6:.1f} MB moved of at least {least / 1e6:.1f}" if moved and least is not None else ""
            return words + (f", {count_words(replayed)} replayed" if replayed else ""), number_or_none(event.get("pause_seconds"))
        case "checkpoint_saved":
            seconds = number_or_none(event.get("seconds"))
            written = "" if seconds is None else f", written in {seconds:.2f} s"
            return f"checkpoint, {float(event.get('bytes') or 0) / 1e6:.1f} MB{written}", number_or_none(event.get("stall_seconds"))
        case "rolled_back":
            return f"rolled back to step {event.get('step')}, from {event.get('from')}", None
        case "checkpoint_load_failed":
            return f"checkpoint {event.get('commit')} could not be read: {event.get('error')}", None
        case "checkpoint_failed":
            return f"checkpoint failed: {event.get('error')}", None
        case "checkpoint_skipped":
            return f"checkpoint skipped: {event.get('reason')}", None
        case "checkpoint_interval":
            held = {"least": ", held at its least", "most": ", held at its most", "persist": ", held at the time of writing"}
            why = f"stall {float(event['stall_seconds']):.3g} s, a failure every {float(event['mtbf_hours']):.3g} h"
            return f"checkpoint every {float(event['seconds']):.0f} s ({why}{held.get(str(event.get('by')), '')})", None
        case "controller_restarted":
            return "controller lost, and started again", None
        case "evaluation" if event.get("sets"):
            heldout = {"held-out": event} if event.get("samples") else {}
            every = {**heldout, **event["sets"]}
            return "evaluation: " + "; ".join(f"{name} {set_words(figures)}" for name, figures in every.items()), None
        case "completions" if event.get("completions"):
            first = event["completions"][0]
            text = f"{first.get('prompt')}{first.get('text')}"
            return f"completion: {text[:SHOWN]!r}{'..' if len(text) > SHOWN else ''}", None
        case "warning":
            return str(event.get("text")), None
        case "run_failed":
            return f"failed: {event.get('error')}", None
        case "run_started" | "run_finished" | "run_stopped":
            return kind.removeprefix("run_") + (f" ({event['reason']})" if event.get("reason") else ""), None
        case _:
            return None


def number_or_none(value: Any) -> float | None:
    """Return the value as a number; None stays None."""
    return None if value is None else float(value)


def count_words(steps: int) -> str:
    """Return a number of steps in words."""
    return "1 step" if steps == 1 else f"{steps} steps"
