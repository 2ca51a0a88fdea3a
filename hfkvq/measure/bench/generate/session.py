"""A whole run: every size with every cache, row by row into the record."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..report import Record
from .cases import Case
from .cold import ColdCalls, measure_processes
from .engines import Engine
from .record import add_agreement, add_speedups, key_of
from .run import Bench
from .search import Row, largest, search_batch


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        cases: sizes to decode at.
        contexts: contexts at which the largest batch is looked for.
        decode: whether to time decode steps.
        turns: whether to time steps of all eager caches in turns, at every case.
        prefill: whether to time prefills, at every context.
        prefill_batch: rows of these.
        prefill_chunk: tokens of a forward of these; None takes prompts whole.
        new_tokens: tokens of `generate` from end to end, at every case; None leaves it out.
        assisted: guesses at a time of a draft model in `generate`, at cases of one row; None leaves it out.
        lookup: likewise of guesses that are looked up in the prompt.
        drafted_tokens: new tokens of these.
        cold: names of engines with which `generate` is called in processes of their own.
        cold_cases: sizes there, in this order.
        cold_tokens: new tokens of a call there.
        first_batch: where searches begin.
        batch_step: a multiple of which they look for.
    """

    cases: tuple[Case, ...] = ()
    contexts: tuple[int, ...] = ()
    decode: bool = True
    turns: bool = False
    prefill: bool = False
    prefill_batch: int = 1
    prefill_chunk: int | None = None
    new_tokens: int | None = None
    assisted: int | None = None
    lookup: int | None = None
    drafted_tokens: int = 64
    cold: tuple[str, ...] = ()
    cold_cases: tuple[Case, ...] = ()
    cold_tokens: int = 64
    first_batch: int = 32
    batch_step: int = 32

    def __post_init__(self) -> None:
        """Checks that there is something to do."""
        if not (self.warm or self.cold):
            raise ValueError("decode: nothing is left to measure; add --turns, --prefill, --whole or --cold.")
        if self.drafts and not any(case.batch == 1 for case in self.cases):
            raise ValueError("cases: a draft guesses for one row; add a size such as 1x1k.")
        if self.contexts and not self.decode:
            raise ValueError("batch: got auto, which is looked for by decoding; leave --no-decode out.")

    @property
    def drafts(self) -> dict[str, int]:
        """Guesses at a time by kind of row."""
        return {kind: tokens for kind, tokens in (("assisted", self.assisted), ("lookup", self.lookup)) if tokens}

    @property
    def warm(self) -> bool:
        """Whether anything is measured in this process."""
        return bool(self.decode or self.turns or self.prefill or self.new_tokens or self.drafts)


class Session:
    """Measures what a plan says and a record does not hold yet.

    Args:
        bench: the model.
        engines: the caches.
        plan: the sizes.
        record: rows are added to it; those it has are not measured again.
        keep: is called after every row, to save the record.
        progress: is told what comes next.
    """

    def __init__(
        self,
        bench: Bench,
        engines: Sequence[Engine],
        plan: Plan,
        record: Record,
        keep: Callable[[], None] = lambda: None,
        progress: Callable[[str], None] = lambda what: None,
    ) -> None:
        self.bench, self.engines, self.plan, self.record = bench, engines, plan, record
        self.keep, self.progress = keep, progress

    def groups(self) -> Iterator[list[Row]]:
        """Rows of one kind and size at a time, for a table; of a search, all of one cache."""
        plan, bench = self.plan, self.bench
        if plan.prefill:
            contexts = [case.context for case in plan.cases] + list(plan.contexts)
            for context in dict.fromkeys(contexts):
                case = Case(plan.prefill_batch, context)
                yield self._group("prefill", case, functools.partial(bench.prefill, chunk=plan.prefill_chunk))
        for case in plan.cases:
            if plan.decode:
                yield self._group("decode", case, bench.decode)
            if plan.turns:
                yield self._turns(case)
            if plan.new_tokens is not None:
                whole = functools.partial(bench.whole, tokens=plan.new_tokens)
                yield self._group("whole", case, whole, tokens=plan.new_tokens)
            if case.batch == 1:
                for kind, guesses in plan.drafts.items():
                    tokens = plan.drafted_tokens
                    assisted = functools.partial(bench.assisted, kind=kind, tokens=tokens, guesses=guesses)
                    # What is compiled takes nothing back.
                    engines = [engine for engine in self.engines if engine.croppable]
                    yield self._group(kind, case, assisted, engines, tokens)
        for context in plan.contexts:
            yield from self._search(context)

    def _group(
        self,
        kind: str,
        case: Case,
        measure: Callable[[Engine, Case], Row],
        engines: Sequence[Engine] | None = None,
        tokens: int | None = None,
    ) -> list[Row]:
        chosen = self.engines if engines is None else engines
        rows = [self._once(kind, engine, case, measure, tokens) for engine in chosen]
        add_speedups(self.record["rows"])
        add_agreement(self.record["rows"])
        return rows

    def _once(
        self,
        kind: str,
        engine: Engine,
        case: Case,
        measure: Callable[[Engine, Case], Row],
        tokens: int | None = None,
    ) -> Row:
        key = (kind, engine.name, case.batch, case.context, tokens)
        for row in self.record["rows"]:
            if key_of(row) == key:
                return row
        self.progress(f"{kind}, {case.title}: {engine.name}")
        row = measure(engine, case)
        self.record["rows"].append(row)
        self.keep()
        return row

    def _turns(self, case: Case) -> list[Row]:
        engines = [engine for engine in self.engines if not engine.compiled]
        keys = {("turns", engine.name, case.batch, case.context, None) for engine in engines}
        rows = [row for row in self.record["rows"] if key_of(row) in keys]
        if len(rows) < len(keys):
            # A round has all of them, or they could not be compared.
            self.progress(f"turns, {case.title}")
            rows = self.bench.turns(engines, case)
            self.record["rows"][:] = [*(row for row in self.record["rows"] if key_of(row) not in keys), *rows]
            self.keep()
        add_speedups(self.record["rows"])
        return rows

    def _search(self, context: int) -> Iterator[list[Row]]:
        found = []
        for engine in self.engines:
            # Bound now: the generator goes on with the next engine.
            def measure(batch: int, engine: Engine = engine) -> Row:
                return self._once("decode", engine, Case(batch, context), self.bench.decode)

            rows = search_batch(measure, self.plan.first_batch, self.plan.batch_step)
            add_speedups(self.record["rows"])
            yield rows
            best = largest(rows)
            row: Row = {"kind": "largest", "engine": engine.name, "context": context}
            if best is None:
                row |= {"batch": 0, "error": rows[-1]["error"]}
                row |= {name: True for name in ("oom", "skipped") if rows[-1].get(name)}
            else:
                row |= {"batch": best["largest"], **best}
            others = [other for other in self.record["rows"] if not _same_search(other, row)]
            self.record["rows"][:] = [*others, row]
            self.keep()
            found.append(row)
        yield found


def cold_rows(
    plan: Plan,
    orders: Mapping[str, ColdCalls],
    record: Record,
    keep: Callable[[], None] = lambda: None,
    progress: Callable[[str], None] = lambda what: None,
) -> list[Row]:
    """Rows of first calls that a plan asks for, in processes of their own; those that a record holds are kept.

    Args:
        plan: what to measure.
        orders: what to tell the process, by name of the engine.
        record: rows are added to it.
        keep: is called after every process, to save the record.
        progress: is told what comes next.
    """
    keys = {
        name: [("cold", name, case.batch, case.context, plan.cold_tokens) for case in plan.cold_cases]
        for name in plan.cold
    }
    held = {key_of(row) for row in record["rows"]}
    # A size's first call depends on those before, so an engine's are all measured, or none.
    missing = [name for name in plan.cold if not held.issuperset(keys[name])]
    progress(f"first calls: {', '.join(missing)}")
    for name, rows in zip(missing, measure_processes([orders[name] for name in missing]), strict=True):
        record["rows"][:] = [*(row for row in record["rows"] if key_of(row) not in keys[name]), *rows]
        keep()
    add_agreement(record["rows"])
    wanted = [key for name in plan.cold for key in keys[name]]
    found = {key_of(row): row for row in record["rows"]}
    return [found[key] for key in wanted]


def _same_search(one: Row, other: Row) -> bool:
    return all(one[name] == other[name] for name in ("kind", "engine", "context"))


def failures(record: Record) -> list[Row]:
    """Rows that failed otherwise than by a full memory or a missing package."""
    return [row for row in record["rows"] if "error" in row and not row.get("oom") and not row.get("skipped")]
