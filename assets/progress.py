"""Shows a run while it goes on: what runs, what was cached, what it took, the time left. Reads the event log, so any executor is shown."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import monotonic

import dagster as dg
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from assay.assets.plan import Item
from assay.assets.steps import NOT_BEGUN

EVENTS = {
    dg.DagsterEventType.STEP_START,
    dg.DagsterEventType.ASSET_MATERIALIZATION,
    dg.DagsterEventType.STEP_FAILURE,
    dg.DagsterEventType.STEP_UP_FOR_RETRY,
}


class Board:
    """What is known of a run so far."""

    def __init__(self, items: Sequence[Item], console: Console):
        self.left = {item.key: item.seconds for item in items}
        self.console, self.total = console, len(items)
        self.predicted, self.began, self.step_began = 0.0, monotonic(), monotonic()
        self.now, self.built, self.cached, self.failed = "starting", 0, 0, 0

    def see(self, event: dg.DagsterEvent) -> None:
        kind = event.event_type
        if kind == dg.DagsterEventType.STEP_START:
            self.now, self.step_began = (event.step_key or "").replace("__", " / "), monotonic()
        elif kind == dg.DagsterEventType.ASSET_MATERIALIZATION and event.asset_key is not None:
            self._materialized(event)
        elif kind == dg.DagsterEventType.STEP_UP_FOR_RETRY:
            self._say(f"[yellow]again[/]   {(event.step_key or '').replace('__', ' / ')}: {_reason(event)}")
        elif kind == dg.DagsterEventType.STEP_FAILURE and _reason(event) != NOT_BEGUN:
            self.failed += 1
            self._say(f"[red]failed[/]  {(event.step_key or '').replace('__', ' / ')}: {_reason(event)}")

    def _materialized(self, event: dg.DagsterEvent) -> None:
        assert event.asset_key is not None
        told = {key: value.value for key, value in event.step_materialization_data.materialization.metadata.items()}
        name = " / ".join(event.asset_key.path)
        self.predicted += self.left.pop(event.asset_key, 0.0)
        if told.get("cached"):
            self.cached += 1
            self._say(f"[dim]cached  {name}[/]")
            return
        self.built += 1
        size = told.get("size_bytes")
        details = [f"{told['seconds']:.1f} s"] if isinstance(told.get("seconds"), float) else []
        details += [f"{size / 2**20:,.1f} MiB"] if isinstance(size, int) and size > 2**20 else []
        details += [f"{label} {told[key]:.4g}" for key, label in _HEADLINES.items() if isinstance(told.get(key), float)]
        self._say(f"[green]done[/]    {name}  [dim]{'  '.join(details)}[/]")

    def _say(self, line: str) -> None:
        self.console.print(line, soft_wrap=True)

    def time_left(self) -> str:
        """Predicted seconds of what is left, at the pace of what is done."""
        spent = self.step_began - self.began
        pace = spent / self.predicted if self.predicted > 5 else 1.0
        seconds = max(0.0, sum(self.left.values()) * pace - (monotonic() - self.step_began))
        return f"{int(seconds // 60)}:{int(seconds % 60):02d} left" if self.left else "finishing"


_HEADLINES = {"kl_mean_nats": "KL", "perplexity": "ppl", "decode_tok_s": "tok/s", "acceptance_rate": "accepted"}


def _reason(event: dg.DagsterEvent) -> str:
    data = event.event_specific_data
    error = getattr(data, "error", None)
    failure = getattr(data, "user_failure_data", None)
    text = (failure and failure.description) or (error and error.message) or "no reason was given"
    return str(text).strip().splitlines()[0]


@contextmanager
def shown(of: dg.DagsterInstance, run_id: str, items: Sequence[Item], console: Console) -> Iterator[Board]:
    """Show the run ``run_id`` while the body executes it; live on a terminal, a line an event elsewhere."""
    board, over = Board(items, console), threading.Event()
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=board.total, left="")

        def follow() -> None:
            cursor: str | None = None
            while True:
                last = over.is_set()
                connection = of.get_records_for_run(run_id, cursor=cursor, of_type=EVENTS) if of.has_run(run_id) else None
                for record in connection.records if connection else ():
                    if record.event_log_entry.dagster_event:
                        board.see(record.event_log_entry.dagster_event)
                cursor = connection.cursor if connection else cursor
                bar.update(task, completed=board.total - len(board.left), description=board.now[-60:], left=board.time_left())
                if last and not (connection and connection.has_more):
                    return
                over.wait(0.4)

        follower = threading.Thread(target=follow, name="progress", daemon=True)
        follower.start()
        try:
            yield board
        finally:
            over.set()
            follower.join(timeout=30)
