"""Mistakes in the search of the fastest options."""

from tests.drills.mistakes import Mistake

_SEARCH = "loka_jax/search"

MISTAKES = [
    Mistake(
        "one disturbed line changes the speed of a trial",
        f"{_SEARCH}/history.py",
        "        return statistics.median(self.rates)",
        "        return statistics.fmean(self.rates)",
    ),
    Mistake(
        "a trial replaces those before it",
        f"{_SEARCH}/history.py",
        "trials=(*file.trials, trial))",
        "trials=(trial,))",
    ),
    Mistake(
        "trials of other runs are taken for those of this one",
        f"{_SEARCH}/history.py",
        "        if differs := jsonfile.explain_mismatch(kept, now):",
        "        if differs := jsonfile.explain_mismatch(now, now):",
    ),
    Mistake(
        "a killed trial is a crash",
        f"{_SEARCH}/trial.py",
        "    if code == -signal.SIGKILL:",
        "    if code == signal.SIGKILL:",
    ),
    Mistake(
        "trials behind one that failed are lost",
        f"{_SEARCH}/trial.py",
        "        while files:",
        "        if files:",
    ),
    Mistake(
        "a trial evaluates and saves",
        f"{_SEARCH}/trial.py",
        "        eval_every=_NEVER,",
        "        eval_every=64,",
    ),
    Mistake(
        "what fits into memory is not learned",
        f"{_SEARCH}/proxy.py",
        "    known = [*_SURE, *((trial.memory_share, trial.is_ok) for trial in ended)]",
        "    known = [*_SURE]",
    ),
    Mistake(
        "choices that crash are tried again and again",
        f"{_SEARCH}/proxy.py",
        "    works = fits(cases, trials) * _runs(cases, trials)",
        "    works = fits(cases, trials)",
    ),
    Mistake(
        "trials of other spaces teach nothing",
        f"{_SEARCH}/proxy.py",
        "    added = _added(both, earlier)",
        "    added = _added(both, ())",
    ),
    Mistake(
        "no trial explores",
        f"{_SEARCH}/proxy.py",
        "    if ok == _EXPLORE_AFTER and likely:",
        "    if ok == -_EXPLORE_AFTER and likely:",
    ),
    Mistake(
        "what changes the numbers is searched unasked",
        f"{_SEARCH}/space.py",
        "if known.why_named is None]",
        "if known.values]",
    ),
    Mistake(
        "the host's part of a step does not depend on the steps of a call",
        f"{_SEARCH}/predicted.py",
        "max(host, self.rates.call_us / steps - sum(us.values()))",
        "max(host, self.rates.call_us - sum(us.values()))",
    ),
    Mistake(
        "the winner is written with the user's own options",
        "experiments/search.py",
        "        if case.key == best.key",
        "        if case.key == own.key",
        "unit/experiments/search_test.py",
    ),
    Mistake(
        "the user's own configuration is not tried first",
        "experiments/search.py",
        "            if not any(trial.key == self.cases[0].key for trial in trials):",
        "            if not trials and len(self.cases) < 2:",
        "unit/experiments/search_test.py",
    ),
]
