"""How often the monitor's alarms are right, false and early, beside other detectors, on the same runs.

    python benchmarks/alarms.py

Trains the runs of `alarm_runs`: 47 healthy ones and 130 of eight faults on seeds from 0 on, and 80 on seeds from 1000 on. The
factors of the rules, and those of the two published detectors, were chosen on the latter alone. Finished runs are kept in
the folder, so that rules can be tried again without training. About 35 minutes on one thread.

A run is hurt where its loss rises by .3 nats above its own least value (means over ten steps), or ends more than .1 nats
above the healthy run of the same model and seed. A detector is early in a hurt run where its first alarm is before that
rise, or where it rings and the loss never rises.
"""

import argparse
import math
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

import alarm_runs
import harness
from alarm_runs import FAULTS, Run, Setting, settings, stored
from massieu.probing.monitor.alarm_history import History, Numbers, Place
from massieu.probing.monitor.alarm_rules import RULES, Rule
from massieu.probing.monitor.alarms import Alarms

FOLDER = Path("massieu-results/alarms")
HEALTHY = 40
BROKEN = {fault: 5 if fault.startswith("rounded") else 20 for fault in FAULTS}
HEALTHY_TUNED = 42
BROKEN_TUNED = dict(zip(FAULTS, (6, 6, 3, 5, 6, 6, 3, 3), strict=True))

RISE, SMOOTHED = 0.3, 10
"""The loss shows trouble where its mean over so many steps is so many nats above its least so far."""
WORSE = 0.1
"""A run that ends so many nats above its healthy twin is hurt."""
TRAILING = 50
"""Steps of the trailing window of the rules of gradient norm and loss spike."""
GRADIENT_FACTOR = 3.0
SPIKE_DEVIATIONS = 5.0


# --- when each detector rings ------------------------------------------------------------------------------------------


def loss_rises(run: Run) -> int | None:
    """The step at which the loss itself shows trouble."""
    means = np.convolve(run.losses, np.ones(SMOOTHED) / SMOOTHED, "valid")
    risen = ~(means <= np.minimum.accumulate(means) + RISE)
    return int(risen.argmax()) + SMOOTHED - 1 if risen.any() else None


def gradient_rule(run: Run) -> int | None:
    """The gradient norm is over three times its trailing median."""
    for step in range(10, len(run.norms)):
        if not run.norms[step] <= GRADIENT_FACTOR * np.median(run.norms[max(0, step - TRAILING) : step]):
            return step
    return None


def loss_spike(run: Run) -> int | None:
    """The loss is five standard deviations above its trailing mean."""
    for step in range(20, len(run.losses)):
        past = run.losses[max(0, step - TRAILING) : step]
        if not run.losses[step] <= past.mean() + SPIKE_DEVIATIONS * past.std():
            return step
    return None


def watched(run: Run) -> dict[str, tuple[tuple[Place, ...], np.ndarray]]:
    """The quantities of the rules: the place of each number, and the numbers by record."""
    found = {}
    for rule in RULES:
        quantity = "entropy_fraction" if rule.quantity == "distance_from_uniform" else rule.quantity
        # Names such as massieu/layer0/head1/entropy, massieu/layer0/spread and massieu/gradient_norm.
        names = [key for key in run.keys if key.startswith("massieu/") and key.endswith(f"/{quantity}")]
        if not names:  # the share of unchanged weights is of half precision alone
            continue
        numbers = np.stack([run.curve(name) for name in names], 1)
        if rule.quantity == "distance_from_uniform":
            numbers = 1 - numbers
        found[rule.quantity] = tuple(Place(name, None) for name in names), numbers
    return found


def monitor_alarms(run: Run, stride: int = 1) -> dict[str, int]:
    """The step of the first alarm of each rule, where every so many of the records were taken."""
    quantities = watched(run)
    compare = Alarms()
    first: dict[str, int] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for row in range(0, len(run.steps), stride):
            step = int(run.steps[row])
            numbers = {name: Numbers(places, values[row]) for name, (places, values) in quantities.items()}
            for alarm in compare(numbers, step):
                first.setdefault(alarm.rule.title, step)
    return first


@dataclass(frozen=True)
class Factors:
    """How far a published detector's numbers must fall below their history, and at first below the first record."""

    factor: float
    factor_at_first: float


def falls(run: Run, numbers: np.ndarray, factors: Factors) -> int | None:
    """The first alarm of a published detector, with the monitor's own rule of history, chance and two records running.

    Args:
        run: the run.
        numbers: shape (records, N).
        factors: of the rule.
    """
    rule = Rule(
        "published detector",
        quantity="published",
        key="published",
        rises=False,
        factor=factors.factor,
        factor_at_first=factors.factor_at_first,
        negligible=1e-3,
        first_step="",
    )
    history = History(rule)
    places = tuple(Place(str(column), None) for column in range(numbers.shape[1]))
    for row, step in enumerate(run.steps.tolist()):
        if history.add(Numbers(places, numbers[row]), step) is not None:
            return step
    return None


def alignment(run: Run) -> np.ndarray:
    """Sign diversity, mean over linear layers; shape (records, 1)."""
    return np.stack([run.curve(key) for key in run.keys if key.startswith("alignment/")], 1).mean(1, keepdims=True)


def bilinear(run: Run) -> np.ndarray:
    """Spectral entropy of each head's query-key form; shape (records, heads)."""
    return np.stack([run.curve(key) for key in run.keys if key.startswith("bilinear/")], 1)


PUBLISHED: dict[str, Callable[[Run], np.ndarray]] = {"Spectral Alignment": alignment, "spectral entropy": bilinear}


def quiet_factors(runs: list[Run], numbers: Callable[[Run], np.ndarray]) -> Factors:
    """The least factors, of a ladder, at which a published detector is silent in healthy runs."""
    ladder = [1.02**power for power in range(1, 250)]

    def silent(factors: Factors) -> bool:
        return all(falls(run, numbers(run), factors) is None for run in runs)

    factor = next(each for each in ladder if silent(Factors(each, math.inf)))
    at_first = next(each for each in ladder if silent(Factors(math.inf, each)))
    return Factors(factor, at_first)


# --- what a run is -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judged:
    """One run: whether it was hurt, and when each detector rang."""

    setting: Setting
    final_loss: float
    hurt: bool
    loss: int | None
    alarms: dict[str, int | None]
    """By detector, the massieu monitor's rules among them."""


def judged(runs: dict[Setting, Run], factors: dict[str, Factors]) -> list[Judged]:
    """Every run with its detectors' first alarms."""
    final = {setting: float(run.losses[-30:].mean()) for setting, run in runs.items()}
    found = []
    for setting, run in runs.items():
        rises = loss_rises(run)
        rules = monitor_alarms(run)
        rung: dict[str, int | None] = {"massieu.Monitor": min(rules.values(), default=None)}
        rung |= {rule.title: rules.get(rule.title) for rule in RULES}
        rung |= {"gradient norm": gradient_rule(run), "loss spike": loss_spike(run)}
        rung |= {name: falls(run, numbers(run), factors[name]) for name, numbers in PUBLISHED.items()}
        twin = Setting(setting.model, None, setting.seed)
        hurt = rises is not None or not final[setting] <= final[twin] + WORSE
        found.append(Judged(setting, final[setting], hurt, rises, rung))
    return found


def summary(runs: list[Judged], detector: str) -> dict[str, Any]:
    """How often a detector rang in these runs, how often early, and the median lead where the loss rose later or before."""
    hurt = [run for run in runs if run.hurt]
    early = [run for run in hurt if (at := run.alarms[detector]) is not None and (run.loss is None or at < run.loss)]
    leads = [run.loss - at for run in hurt if run.loss is not None and (at := run.alarms[detector]) is not None]
    return {
        "rang": sum(run.alarms[detector] is not None for run in runs),
        "early": len(early),
        "median_lead": median(leads) if leads else None,
        "leads": len(leads),
    }


def coarser(runs: dict[Setting, Run], found: list[Judged], stride: int) -> dict[str, int]:
    """False alarms, and early ones in hurt runs, where only every so many of the records were taken."""
    false_alarms = early = 0
    for run in found:
        first = min(monitor_alarms(runs[run.setting], stride).values(), default=None)
        false_alarms += run.setting.fault is None and first is not None
        early += run.hurt and first is not None and (run.loss is None or first < run.loss)
    healthy = sum(run.setting.fault is None for run in found)
    hurt = sum(run.hurt for run in found)
    return {
        "every": stride * alarm_runs.EVERY,
        "healthy": healthy,
        "false_alarms": false_alarms,
        "hurt": hurt,
        "early": early,
    }


SIMULATED_RUNS, SIMULATED_RECORDS = 30, 100
SIMULATED_RULE = "collapsing tokens"
"""The rule with the smallest factor, for which chance counts most."""


def simulated() -> list[dict[str, Any]]:
    """Runs of noise in which a rule rang: logarithms that walk at random, or scatter around a level."""
    generator = np.random.default_rng(0)
    rule = next(rule for rule in RULES if rule.title == SIMULATED_RULE)
    rows = []
    for kind, deviation, count in product(("random walk", "noise around a level"), (0.03, 0.1, 0.3), (1, 24, 144)):
        places = tuple(Place(str(column), None) for column in range(count))
        rang = 0
        for _ in range(SIMULATED_RUNS):
            levels = deviation * generator.normal(size=(SIMULATED_RECORDS, count))
            if kind == "random walk":
                levels = levels.cumsum(0)
            history = History(rule)
            alarms = [history.add(Numbers(places, np.exp(row)), step) for step, row in enumerate(levels)]
            rang += any(alarm is not None for alarm in alarms)
        rows.append({"kind": kind, "deviation": deviation, "numbers": count, "runs": SIMULATED_RUNS, "rang": rang})
    return rows


def trained(first_seed: int, healthy: int, broken: dict[str, int], folder: Path) -> dict[Setting, Run]:
    """The runs of one set, from the folder or trained now."""
    wanted = {setting.name: setting for setting in settings(first_seed, healthy, broken)}
    return {wanted[name]: stored(wanted[name], folder) for name in harness.steps(wanted)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, metavar="DIR", help="where finished runs are kept")
    parser.add_argument("--tuned", action="store_true", help="print the table of the seeds that rules were chosen on")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tuned = trained(alarm_runs.TUNED_SEED, HEALTHY_TUNED, BROKEN_TUNED, arguments.folder)
    healthy = [run for setting, run in tuned.items() if setting.fault is None]
    factors = {name: quiet_factors(healthy, numbers) for name, numbers in PUBLISHED.items()}
    runs = tuned if arguments.tuned else trained(0, HEALTHY, BROKEN, arguments.folder)
    found = judged(runs, factors)
    kinds: list[dict[str, Any]] = []
    for fault in (None, *FAULTS):
        of_kind = [run for run in found if run.setting.fault == fault]
        hurt = sum(run.hurt for run in of_kind)
        rises = sum(run.loss is not None for run in of_kind)
        detectors = {name: summary(of_kind, name) for name in of_kind[0].alarms}
        kinds.append(
            {
                "kind": fault or "healthy",
                "runs": len(of_kind),
                "hurt": hurt,
                "loss_rises": rises,
                "detectors": detectors,
            }
        )
    for kind in kinds:
        print(f"\n{kind['kind']}: {kind['runs']} runs, {kind['hurt']} hurt, the loss rises in {kind['loss_rises']}")
        for name, numbers in kind["detectors"].items():
            print(
                f"  {name:24} rang {numbers['rang']:3}  early {numbers['early']:3}  median lead {numbers['median_lead']}"
            )
    print("factors", factors)
    if not arguments.tuned:
        columns = ["model", "fault", "seed", "final loss", "hurt", "loss rises", *found[0].alarms]
        each = [
            ",".join(
                "" if value is None else str(value)
                for value in (
                    run.setting.model,
                    run.setting.fault,
                    run.setting.seed,
                    round(run.final_loss, 3),
                    run.hurt,
                    run.loss,
                    *run.alarms.values(),
                )
            )
            for run in found
        ]
        harness.save(
            "alarms",
            factors={name: asdict(each) for name, each in factors.items()},
            kinds=kinds,
            simulated=simulated(),
            coarser=[coarser(runs, found, stride) for stride in (1, 2, 4)],
            runs=[",".join(columns), *each],
        )


if __name__ == "__main__":
    main()
