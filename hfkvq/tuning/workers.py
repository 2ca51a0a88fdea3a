"""Trials shared by workers: each is run once, and those of a worker that died are taken up again."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from optuna import Study, create_trial
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, Trial, TrialState

BEAT = "hfkvq:beat"
SURPLUS = "hfkvq:surplus"
AGAIN = "hfkvq:again"
DEATHS = "hfkvq:deaths"

MOST_DEATHS = 2
"""Of workers, after which a trial stays failed: it may be what kills them."""


@contextmanager
def beating(trial: Trial, seconds: float) -> Iterator[None]:
    """Counts up in the storage while the trial runs, so that others see that its worker lives.

    A count, not a time: machines' clocks differ. Optuna's own heartbeat is for databases alone.
    """
    stop = threading.Event()

    def beat() -> None:
        count = 0
        while not stop.wait(seconds):
            count += 1
            try:
                trial.set_user_attr(BEAT, count)
            except UpdateFinishedTrialError:
                # Others took this worker for dead and the trial for their own.
                return

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class Watch:
    """Sees which running trials have stopped beating.

    Args:
        grace: seconds without a beat after which a worker counts as dead.
    """

    def __init__(self, grace: float) -> None:
        self.grace = grace
        self._seen: dict[int, tuple[object, float]] = {}

    def revive(self, study: Study) -> list[FrozenTrial]:
        """Fails the trials of dead workers and gives them back; of several watchers only one does so."""
        now, revived = time.monotonic(), []
        for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            beat = trial.user_attrs.get(BEAT)
            last = self._seen.get(trial._trial_id)
            if last is None or last[0] != beat:
                self._seen[trial._trial_id] = (beat, now)
            elif now - last[1] > self.grace and give_back(study, trial, died=True):
                revived.append(trial)
        return revived


def give_back(study: Study, trial: FrozenTrial, died: bool = False) -> bool:
    """Fails a trial and puts it in the queue again; False if it is finished, or others have done so.

    Args:
        study: of the trial.
        trial: as it is running.
        died: whether its worker has. A trial that cost `MOST_DEATHS` workers stays failed.
    """
    try:
        if not study._storage.set_trial_state_values(trial._trial_id, TrialState.FAIL):
            return False
    except UpdateFinishedTrialError:
        return False
    deaths = trial.user_attrs.get(DEATHS, 0) + died
    if deaths >= MOST_DEATHS:
        return True
    attrs = {name: value for name, value in trial.user_attrs.items() if name != BEAT}
    study.add_trial(
        create_trial(
            state=TrialState.WAITING,
            params=trial.params,
            distributions=trial.distributions,
            user_attrs={**attrs, AGAIN: trial.number, DEATHS: deaths},
            # What was asked for by name is asked for again.
            system_attrs={"fixed_params": dict(trial.params)},
        )
    )
    return True


def finished(study: Study) -> list[FrozenTrial]:
    """Trials that are done: measured, or stopped early by the pruner."""
    return [
        trial
        for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))
        if SURPLUS not in trial.user_attrs
    ]


def work(
    study: Study,
    trials: int,
    ask: Callable[[], Trial],
    run: Callable[[Trial], None],
    *,
    beat: float,
    grace: float,
    poll: float = 1.0,
) -> None:
    """Runs trials until the study has so many that are finished, those of other workers counted.

    Args:
        study: shared by all workers.
        trials: finished ones wanted, in all.
        ask: a new trial.
        run: measures one, and tells the study.
        beat: seconds between signs of life.
        grace: see `Watch`.
        poll: seconds to wait while the last trials are run by others.
    """
    watch = Watch(grace)
    while len(finished(study)) < trials:
        watch.revive(study)
        running = len(study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)))
        if len(finished(study)) + running >= trials:
            # One of them may yet die.
            time.sleep(poll)
            continue
        trial = None
        try:
            with undisturbed():
                trial = ask()
            if _before(study, trial.number) >= trials:
                # Several workers asked at once. Numbers are the storage's, so all agree whose is one too many.
                trial.set_user_attr(SURPLUS, True)
                study.tell(trial, state=TrialState.PRUNED)
                continue
            with beating(trial, beat):
                run(trial)
        except KeyboardInterrupt:
            # Nothing is wrong with the trial.
            if trial is not None:
                give_back(study, study.get_trials(deepcopy=False)[trial.number])
            raise


@contextmanager
def undisturbed() -> Iterator[None]:
    """Keeps Ctrl-C, and whatever else Python code handles, waiting for a moment."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    mine = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in mine:
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in mine.items():
            signal.signal(number, handler)
        for number in came[:1]:
            signal.raise_signal(number)


def _before(study: Study, number: int) -> int:
    """Trials with a lower number that are finished or on their way."""
    running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    return sum(trial.number < number for trial in [*finished(study), *running])
