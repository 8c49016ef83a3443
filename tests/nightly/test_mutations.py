"""Mistakes in the kernels show in the tests of their engines, nearly all.

All mutants of an engine are in one library, which says whose places a test reaches. For a mutant such tests run in a
child process each, the fastest first, until one fails, crashes or hangs. `pytest tests/nightly -s` names the others.
"""

from __future__ import annotations

import ctypes
import dataclasses
import faulthandler
import functools
import importlib
import inspect
import itertools
import os
import re
import resource
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests import emulation, engines, test_engines_cpu
from tests.emulation import SOURCES, amalgamate, compile_shared
from tests.nightly.operators import MOST_NUMBERS, Site, sites_of, with_switches

MUTANTS = 200
LEFT_OUT = 0.25  # of them are synchronisations, of which there are far fewer than numbers
LEAST_CAUGHT = 0.85
SPARE = 2  # times as many are compiled: the tests do not reach all
MOST_SECONDS = 10.0  # for the tests of one mutant, as they take without it


# Mutants are made in an engine's own files; others are another engine's, or the stand-ins replace them.
NAMES = ("direct", "depthwise", "wgmma", "gather", "mma", "pointwise", "stem", "tma", "hopper_wgrad", "tma_wgrad")
HEADERS = {"direct": "correlate.cuh", "depthwise": "depthwise_grad.cuh", "mma": "tf32.cuh"}
HEADERS |= {"tma": "channels_last.cuh"}
FILES = {name: {f"{name}.cu", HEADERS.get(name)} for name in NAMES}


def build(name: str, folder: Path, transform: Callable[[str], str]) -> engines.Emulated:
    """An engine of whose amalgamated source a transform comes first. Indices behind an array trap, of registers too."""

    def compile_with_bounds(source: str, folder: Path, *flags: str) -> ctypes.CDLL:
        return compile_shared(source, folder, *flags, "-fsanitize=bounds")

    with mock.patch.object(emulation, "compile_shared", compile_with_bounds):
        return engines.Emulated(name, folder, transform)


# Tests of the tests, and those that ask a planner only or look at the library's file.
NO_CHECKS = re.compile("refuses|plan_for_every")
MOST_SETTINGS = {"gather": 15}  # of a test's parameters; of other engines 40


@dataclasses.dataclass
class Check:
    """A test with its parameters; how long it takes and which mutants it reaches."""

    run: Callable[[], None]
    seconds: float = 0.0
    reaches: frozenset[int] = frozenset()


@dataclasses.dataclass
class Built:
    """A library with its mutants by number, from 1, and what finds them."""

    name: str
    sites: dict[int, Site]
    shim: Any
    checks: list[Check]


def settings_of(test: Callable) -> list[dict[str, Any]]:
    """What pytest would pass for a test's parameters."""
    axes = []
    for mark in getattr(test, "pytestmark", ()):
        if mark.name == "parametrize":
            names = [name.strip() for name in mark.args[0].split(",")]
            values = [getattr(value, "values", value if len(names) > 1 else (value,)) for value in mark.args[1]]
            axes.append([dict(zip(names, of_names, strict=True)) for of_names in values])
    return [{name: value for one in combined for name, value in one.items()} for combined in itertools.product(*axes)]


def checks_of(name: str, shim: engines.Emulated) -> Iterator[Check]:
    """The tests of an engine that take nothing but its fixture and parameters, and more."""
    own = Path(__file__).parent.parent / f"test_{name}.py"
    modules = [test_engines_cpu, *([importlib.import_module(f"tests.test_{name}")] if own.exists() else [])]
    for of_test, test in itertools.chain(*(inspect.getmembers(module, inspect.isfunction) for module in modules)):
        taken = inspect.signature(test).parameters.keys()
        if not of_test.startswith("test_") or NO_CHECKS.search(of_test):
            continue
        all_of = [settings for settings in settings_of(test) if settings.get("emulated", name) == name]
        most = MOST_SETTINGS.get(name, 40)
        step = max(1.0, len(all_of) / most)
        for settings in (all_of[int(i * step)] for i in range(min(len(all_of), most))):  # evenly spread
            given = settings | {fixture: shim for fixture in ("emulated", f"{name}_shim") if fixture in taken}
            if given.keys() == taken and shim in given.values():
                yield Check(functools.partial(test, **given))
    for run in MORE_CHECKS.get(name, []):
        yield Check(functools.partial(run, shim))


def skips_padding_at_the_end(shim: Any) -> None:
    """The thread that takes a flag down is also the one that would raise it for the first weight."""
    for engine, case, layout, dtype in test_engines_cpu.PADDING_RUNS:
        assert engine != "depthwise" or test_engines_cpu.skips_padding(shim, case, layout, dtype, "w", [-1])


MORE_CHECKS = {"depthwise": [skips_padding_at_the_end]}


def drawn(sites: list[Site], count: int) -> list[Site]:
    """By rank, as many synchronisations as there should be among them."""
    waits = [site for site in sites if site.kind == "left out"]
    others = [site for site in sites if site.kind != "left out"]
    few = min(len(waits), round(count * LEFT_OUT))
    return waits[:few] + others[: count - few]


@functools.cache
def shares() -> dict[str, int]:
    """How many of the mutants are each engine's: as many as it has places for them, of all."""
    headers = SOURCES | {"ptx.cuh": "", **dict.fromkeys(engines.STOOD_IN_FOR, "")}
    places = {name: len(sites_of(amalgamate(headers, [f"{name}.cu"]), files)) for name, files in FILES.items()}
    exact = {name: MUTANTS * count / sum(places.values()) for name, count in places.items()}
    rest = sorted(exact, key=lambda name: int(exact[name]) - exact[name])[: MUTANTS - sum(map(int, exact.values()))]
    return {name: int(share) + (name in rest) for name, share in exact.items()}


def build_mutants(name: str, folder: Path) -> Built:
    """An engine with mutants; without those that do not compile, which the compiler names by their lines."""
    refused = set[tuple[str, int]]()
    numbered: dict[int, Site] = {}

    def transform(source: str) -> str:
        sites = [site for site in sites_of(source, FILES[name]) if (site.file, site.line) not in refused]
        numbered.clear()
        numbered.update(enumerate(drawn(sites, SPARE * shares()[name]), 1))
        return with_switches(source, numbered)

    while True:
        try:
            return Built(name, numbered, build(name, folder, transform), [])
        except AssertionError as error:
            named = re.findall(r"kernels/([\w.]+):(\d+):\d+: (?:error|note)", str(error))
            lines = {(file, int(line)) for file, line in named}
            if not lines & {(site.file, site.line) for site in numbered.values()}:
                raise
            refused |= lines


def measure(built: Built) -> None:
    """Runs all checks, which pass without a mutant."""
    reached = (ctypes.c_ubyte * MOST_NUMBERS).in_dll(built.shim.library, "simt_reached")
    for check in checks_of(built.name, built.shim):
        ctypes.memset(reached, 0, MOST_NUMBERS)
        begin = time.process_time()
        check.run()
        check.seconds = time.process_time() - begin
        check.reaches = frozenset(number for number, yes in enumerate(reached) if yes)
        built.checks.append(check)
    built.checks.sort(key=lambda check: check.seconds)


def passes(library: ctypes.CDLL, mutant: int, check: Check) -> bool:
    """Whether a test passes all the same, in a child that may crash or hang."""
    child, result = os.fork(), 1
    if child == 0:
        try:
            faulthandler.disable()
            for stream in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.setitimer(signal.ITIMER_PROF, 5 + 5 * check.seconds)  # of its own, however busy others are
            signal.setitimer(signal.ITIMER_REAL, 120 + 30 * check.seconds)
            ctypes.c_int.in_dll(library, "simt_mutation").value = mutant
            check.run()
            result = 0
        finally:
            os._exit(result)
    return os.waitpid(child, 0)[1] == 0


def shows(built: Built, mutant: int) -> bool:
    """Whether a check fails with a mutant, of those that reach it."""
    seconds = 0.0
    for check in built.checks:
        if mutant in check.reaches and seconds < MOST_SECONDS:
            seconds += check.seconds
            if not passes(built.shim.library, mutant, check):
                return True
    return False


@pytest.fixture(scope="session")
def futures(tmp_path_factory) -> Iterator[dict[str, Future]]:
    """All engines, one compiled after another while the mutants of those before it run."""
    folder = tmp_path_factory.getbasetemp()
    with ThreadPoolExecutor(max_workers=1) as pool:
        yield {name: pool.submit(build_mutants, name, folder / f"{name}_with_mutants") for name in FILES}
        pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="session", params=FILES)
def built(request, futures) -> Built:
    of_engine = futures[request.param].result()
    measure(of_engine)
    return of_engine


FOUND: dict[str, list[bool]] = {}  # by engines


def test_mutants_show(built):
    """Not each, which the test below is about: some have no effect, or none on the CPU."""
    reached = frozenset().union(*(check.reaches for check in built.checks))
    numbers = {site: number for number, site in built.sites.items() if number in reached}
    mutants = drawn([*numbers], shares()[built.name])
    assert len(mutants) == shares()[built.name], f"{len(numbers)} of {len(built.sites)} places are reached"
    unseen = [mutant for mutant in mutants if not shows(built, numbers[mutant])]
    FOUND[built.name] = [mutant not in unseen for mutant in mutants]
    print(f"\n{built.name}: {len(mutants) - len(unseen)} of {len(mutants)} mutants show; not", *unseen, sep="\n  ")
    assert len(unseen) <= len(mutants) / 3


def test_nothing_shows_without_a_mutant(built):
    assert all(passes(built.shim.library, 0, check) for check in built.checks[::10])


def test_most_mutants_show():
    if FOUND.keys() != FILES.keys():
        pytest.skip("it is about the mutants of all engines")
    found = [one for of_engine in FOUND.values() for one in of_engine]
    assert sum(found) >= LEAST_CAUGHT * MUTANTS
