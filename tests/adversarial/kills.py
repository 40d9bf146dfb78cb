"""Kills at random moments and at exact places, and two resumes at once: the bytes at the end are always the same."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

from tests.adversarial.folders import SETUPS, ended, killed_at, plain, quick_pictures, same, straight
from tests.adversarial.trial import Told, Trial, Wrong, judged
from tests.warm import Process

FILES = ("", "", "round-", "metrics", "config.toml", "model.safetensors", "result.json")
"""Parts of the names of files at which a run is killed; the empty one is in all of them."""


def case(trial: Trial) -> str:
    """One to three kills, then a resume to the end."""
    quick_pictures()
    setup = trial.one_of(list(SETUPS))
    whole, mine = straight(trial, setup), trial.folder / "run"
    for _ in range(trial.draw.randrange(1, 4)):
        words = going_on(setup, mine)
        if trial.draw.random() < 0.5:
            process = Process(killed_at, file := trial.one_of(FILES), often := trial.draw.randrange(1, 12), words)
            trial.note(setup, "killed at", repr(file), often)
        else:
            process, moment = Process(plain, words), trial.draw.uniform(0.0, 1.0)
            trial.note(setup, "killed after", moment)
            time.sleep(moment)
            process.send_signal(signal.SIGKILL)
        if process.wait(60) != -signal.SIGKILL:
            ending(process)
    if not (mine / "result.json").exists():
        ended(trial, Process(plain, going_on(setup, mine)), 0)
    return alike(mine, whole)


def pair(trial: Trial) -> str:
    """Two resumes of one run, one soon after the other: only one goes on, and the end is right."""
    quick_pictures()
    setup = trial.one_of(list(SETUPS))
    whole, mine = straight(trial, setup), trial.folder / "run"
    Process(killed_at, "round-", 2 * trial.draw.randrange(1, 3), going_on(setup, mine)).communicate(60)
    if asleep := trial.draw.random() < 0.5:
        first = Process(killed_at, "round-", trial.draw.randrange(1, 5), going_on(setup, mine), signal.SIGSTOP)
        trial.note(setup, "resumed while another resume sleeps")
        wait_until_asleep(first)
    else:
        first = Process(plain, going_on(setup, mine))
        trial.note(setup, "resumed twice,", moment := trial.draw.uniform(0.0, 0.5), "seconds apart")
        time.sleep(moment)
    second = Process(plain, going_on(setup, mine))
    verdict = ending(second)
    first.send_signal(signal.SIGCONT)
    ending(first)
    if asleep and verdict == "fine":
        raise Wrong("a run was resumed while another process had it")
    if not (mine / "result.json").exists():
        ended(trial, Process(plain, going_on(setup, mine)), 0)
    return alike(mine, whole)


def wait_until_asleep(process: Process) -> None:
    """Waits until the process has stopped itself, or has ended."""
    while process.poll() is None and Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2][0] != "T":
        time.sleep(0.01)


def ending(process: Process) -> str:
    """How a command in a process of its own ended: fine, or refused in a sentence."""
    out, err = process.communicate(60)
    if (code := process.returncode) is None or code < 0:
        raise Wrong(f"ended by signal {code}: {err[-300:]}")
    if "Traceback" in err:
        raise RuntimeError(err)
    return judged(Told(code, out, err))


def going_on(setup: str, folder: Path) -> list[str]:
    """The command of a run, which goes on if it has begun."""
    begun = (folder / "config.toml").exists()
    return [*SETUPS[setup], "--out", str(folder), *(["--resume"] if begun else [])]


def alike(mine: Path, whole: Path) -> str:
    """The same bytes, metrics and costs."""
    one, other = (json.loads((folder / "result.json").read_text()) for folder in (mine, whole))
    for name in ("metrics", "ledger", "rounds"):
        if one[name] != other[name]:
            raise Wrong(f"{name} differs from that of the undisturbed run")
    return same(mine, whole)
