"""Damaged run folders: a run that was killed half way is damaged, resumed, and must end right or say why not."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
from collections.abc import Callable
from pathlib import Path

from tests.adversarial.trial import Trial, Wrong, command, judged
from tests.warm import Process

COMMON = [
    *("--set", "data.partition.clients=6", "--set", "evaluate.every=1", "--set", "checkpoint.every=2"),
    *("--executor", "loop", "--set", "simulator.threads=1", "--rounds", "8", "--set", "evaluate.metrics=['accuracy']"),
]
DIGITS = [
    *("run", "digits", *COMMON, "--set", "cohort=3", "--set", "client.steps=2", "--set", "central.steps=2"),
    *("--set", "evaluate.sets=['all']"),
]
LATE = ["--set", "schedule.delay=half_normal", "--set", "schedule.sd=2.0"]
SETUPS: dict[str, list[str]] = {
    "fedavg": [*DIGITS, "--set", "client.momentum=0.5"],
    "fedadam": [*DIGITS, "--algorithm", "fedadam", "--set", "algorithms.fedadam.learning_rate=0.05"],
    "gradient_2way": [*DIGITS, "--algorithm", "gradient_2way"],
    "late feddle on disk": [
        *DIGITS, "--algorithm", "feddle", *LATE, "--set", "simulator.in_flight=disk",
        "--set", "algorithms.feddle.anchors=disk", "--set", "algorithms.feddle.atlas=6",
    ],
    "late fedbuff": [*DIGITS, "--algorithm", "fedbuff", *LATE, "--set", "algorithms.fedbuff.buffer=2"],
    "ca2fl": [*DIGITS, "--algorithm", "ca2fl", *LATE, "--set", "algorithms.ca2fl.buffer=2"],
    "lg_fedavg on disk": [
        "run", "lg-digits", *COMMON, "--set", "client.epochs=1", "--set", "simulator.private=disk",
        "--set", "cohort=3", "--set", "algorithms.lg_fedavg.warm_start=3",
    ],
    "mtl": ["run", "lg-digits", *COMMON, "--set", "client.epochs=1", "--set", "cohort=3", "--algorithm", "mtl"],
    "transfer": [*DIGITS, "--algorithm", "transfer"],
    "example_transfer": [*DIGITS, "--algorithm", "example_transfer"],
}  # fmt: skip
COMPARED = ("model.safetensors", "metrics.jsonl")


def killed_at(name: str, how_often: int, words: list[str], sent: int = signal.SIGKILL) -> None:
    """Runs the command in this process, and kills it (or sends it another signal) when it puts a file of that name (or
    any) in place the n-th time.

    Half of the numbers kill just before the file is in its place, the others just after.
    """
    replace, seen = os.replace, [0]

    def put(source: str | Path, target: str | Path) -> None:
        if name in Path(target).name:
            seen[0] += 1
        last = seen[0] == (how_often + 1) // 2 and name in Path(target).name
        if last and how_often % 2:
            os.kill(os.getpid(), sent)
        replace(source, target)
        if last and not how_often % 2:
            os.kill(os.getpid(), sent)

    os.replace = put
    plain(words)


def plain(words: list[str]) -> None:
    """Runs the command in this process and exits as it does; what it says goes to the process's own outputs."""
    quick_pictures()
    told = command(words, patience=0)
    print(told.out, end="")
    os.write(2, told.err.encode())
    os._exit(told.code)


def quick_pictures() -> None:
    """Pictures are not at stake here, and take longer than the runs."""
    from matplotlib.figure import Figure

    Figure.savefig = lambda self, file, **_: file.write(b"\x89PNG")  # type: ignore[assignment]


def made(trial: Trial, name: str, how: Callable[[Path], None]) -> Path:
    """A folder that all cases share, made by the first that wants it; two may make it at once, and one wins."""
    place = trial.shared / name.replace(" ", "-")
    if not place.exists():
        own = trial.folder / "made"
        how(own)
        try:
            own.rename(place)
        except OSError:
            shutil.rmtree(own)
    return place


def straight(trial: Trial, setup: str, *more: str) -> Path:
    """The folder of a run that nobody disturbed."""

    def run(folder: Path) -> None:
        ended(trial, Process(plain, [*SETUPS[setup], *more, "--out", str(folder)]), 0)

    return made(trial, "-".join(["straight", setup, *more]), run)


def half(trial: Trial, setup: str, *more: str) -> Path:
    """The folder of a run that was killed after its second checkpoint, the one of round 4, was in place."""

    def run(folder: Path) -> None:
        words = [*SETUPS[setup], *more, "--out", str(folder)]
        ended(trial, Process(killed_at, "round-00000004", 2, words), -signal.SIGKILL)

    return made(trial, "-".join(["half", setup, *more]), run)


def ended(trial: Trial, process: Process, expected: int) -> None:
    """Waits for a process that must end like this."""
    out, err = process.communicate(60)
    if process.returncode != expected:
        raise Wrong(f"a good run ended with {process.returncode}: {out[-500:]} {err[-1500:]}")


def same(one: Path, other: Path) -> str:
    """Two runs have the same model and metrics, to the byte."""
    for name in COMPARED:
        if (one / name).read_bytes() != (other / name).read_bytes():
            raise Wrong(f"{name} differs from that of the undisturbed run")
    return "fine"


def case(trial: Trial) -> str:
    """Damages a run that was killed, or one that has ended, and resumes it."""
    quick_pictures()
    setup = trial.one_of(list(SETUPS))
    what = trial.one_of(list(DAMAGES))
    trial.note(setup, what)
    whole, mine = straight(trial, setup), trial.folder / "run"
    shutil.copytree(whole if what in FINISHED else half(trial, setup), mine, symlinks=True)
    must_stop = DAMAGES[what](trial, mine, setup)
    told = trial.command(*SETUPS[setup], "--out", mine, "--resume")
    verdict = judged(told)
    if verdict == "fine" and must_stop:
        raise Wrong("resumed, as if nothing had been changed")
    return same(mine, whole) if verdict == "fine" and what not in FINISHED else verdict


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints, oldest first."""
    return sorted((folder / "checkpoints").glob("round-*.safetensors"))


def flip(trial: Trial, file: Path, start: int = 0, end: int | None = None) -> None:
    """One bit of a file, somewhere between two places."""
    content = bytearray(file.read_bytes())
    content[trial.draw.randrange(start, min(end or len(content), len(content)))] ^= 1 << trial.draw.randrange(8)
    file.write_bytes(content)


def header(file: Path) -> int:
    """Where the tensors of a safetensors file begin."""
    return 8 + struct.unpack("<Q", file.read_bytes()[:8])[0]


def flip_in_tensors(trial: Trial, folder: Path, setup: str) -> bool:
    """A bit of a number in the newest checkpoint."""
    flip(trial, checkpoints(folder)[-1], header(checkpoints(folder)[-1]))
    return False


def flip_in_both(trial: Trial, folder: Path, setup: str) -> bool:
    """A bit in each checkpoint: there is nothing left to fall back on."""
    for file in checkpoints(folder):
        flip(trial, file, header(file))
    return True


def flip_in_header(trial: Trial, folder: Path, setup: str) -> bool:
    """A bit of what describes the newest checkpoint."""
    file = checkpoints(folder)[-1]
    flip(trial, file, 0, header(file))
    return False


def edit_header(trial: Trial, folder: Path, setup: str) -> bool:
    """Other numbers in the part of a checkpoint that is text."""
    file = checkpoints(folder)[-1]
    content, start = file.read_bytes(), header(file)
    text = content[8:start]
    old, new = trial.one_of([(b"round", b"ruond"), (b":4", b":6"), (b"F32", b"F16"), (b"4", b"5"), (b"null", b"true")])
    file.write_bytes(content[:8] + text.replace(old, new) + content[start:])
    return False


def other_checkpoint(trial: Trial, folder: Path, setup: str) -> bool:
    """The newest checkpoint of another run: of another seed, or of another algorithm."""
    foreign = half(trial, setup, "--seed", "1") if trial.draw.random() < 0.5 else half(trial, other(trial, setup))
    trial.note(foreign.name)
    shutil.copy(checkpoints(foreign)[-1], checkpoints(folder)[-1])
    return False


def other_checkpoints(trial: Trial, folder: Path, setup: str) -> bool:
    """All checkpoints of a run of another seed."""
    shutil.rmtree(folder / "checkpoints")
    shutil.copytree(half(trial, setup, "--seed", "1") / "checkpoints", folder / "checkpoints")
    return True


def other(trial: Trial, setup: str) -> str:
    """Another set-up."""
    return trial.one_of([name for name in SETUPS if name != setup])


def zero_private(trial: Trial, folder: Path, setup: str) -> bool:
    """Rows on disk beside the checkpoints are zeroed, or cut, or a bit of them flips."""
    files = [path for path in (folder / "checkpoints").rglob("*") if path.is_file() and path not in checkpoints(folder)]
    if not files:
        return flip_in_tensors(trial, folder, setup)
    file = trial.one_of(sorted(files))
    content, how = file.read_bytes(), trial.one_of(["zero", "cut", "flip", "remove"])
    trial.note(how, file.name)
    if how == "remove":
        file.unlink()
    elif how == "flip" and content:
        flip(trial, file)
    else:
        file.write_bytes(bytes(len(content)) if how == "zero" else content[: len(content) // 2])
    return False


def edit_config(trial: Trial, folder: Path, setup: str) -> bool:
    """A setting is changed in the folder, and the command does not say so."""
    file = folder / "config.toml"
    text = file.read_text()
    old, new = trial.one_of([
        ("learning_rate = 0.1", "learning_rate = 0.2"), ("seed = 0", "seed = 5"), ("cohort = 3", "cohort = 2"),
        ("hidden = [", "hidden = [ 7, "), ("clients = 6", "clients = 7"),
    ])  # fmt: skip
    trial.note(old, "→", new)
    file.write_text(text.replace(old, new))
    return old in text


def tear_config(trial: Trial, folder: Path, setup: str) -> bool:
    """The recipe is cut, emptied, or not text."""
    file = folder / "config.toml"
    content = file.read_bytes()
    cuts = (content[: trial.draw.randrange(len(content))], b"", b"\xff\xfe\x00", b"[" * 5000, b"x = 1\n")
    file.write_bytes(trial.one_of(cuts))
    return False


def tear_lines(trial: Trial, folder: Path, setup: str) -> bool:
    """The reported rounds are cut, doubled, emptied, or gone: they are written anew."""
    file = folder / "metrics.jsonl"
    content = file.read_bytes()
    new = trial.one_of([content[: trial.draw.randrange(len(content))], content * 2, b"", b"\xff{", None])
    file.unlink() if new is None else file.write_bytes(new)
    return False


def cut_newest(trial: Trial, folder: Path, setup: str) -> bool:
    """The newest checkpoint has lost its end, and a half-written one lies beside it."""
    newest = checkpoints(folder)[-1]
    newest.write_bytes(newest.read_bytes()[: trial.draw.randrange(newest.stat().st_size)])
    (folder / "checkpoints" / ".round-00000099.safetensors.partial").write_bytes(b"half")
    return False


def lose_checkpoints(trial: Trial, folder: Path, setup: str) -> bool:
    """The newest checkpoint, or all of them, are gone."""
    for file in checkpoints(folder)[trial.one_of([0, -1]) :]:
        file.unlink()
    return False


def link(trial: Trial, folder: Path, setup: str) -> bool:
    """A file to be written is a symbolic link to a file of somebody else."""
    victim = trial.folder / "victim"
    victim.write_text("mine")
    name = trial.one_of(["model.safetensors", "metrics.jsonl", "result.json", "metrics.png", "config.toml"])
    trial.note(name)
    if name == "config.toml":
        victim.write_bytes((folder / name).read_bytes())
    before = victim.read_bytes()
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(victim)
    told = trial.command(*SETUPS[setup], "--out", folder, "--resume")
    judged(told)
    if victim.read_bytes() != before:
        raise Wrong("wrote through a symbolic link")
    return False


def odd_result(trial: Trial, folder: Path, setup: str) -> bool:
    """The result of a run that has ended has another shape."""
    new = trial.one_of(
        [[], 3, None, "x", {}, {"metrics": []}, {"metrics": {"loss": "x"}}, {"ledger": 1}, {"metrics": {"[/]": 1}}]
    )
    text = json.dumps(new) if trial.draw.random() < 0.8 else trial.one_of(["", "{", "\x00", "[" * 100_000])
    trial.note(text[:100])
    (folder / "result.json").write_text(text)
    return False


DAMAGES: dict[str, Callable[[Trial, Path, str], bool]] = {
    function.__name__: function
    for function in (
        flip_in_tensors, flip_in_both, flip_in_header, edit_header, other_checkpoint, other_checkpoints, zero_private,
        edit_config, tear_config, tear_lines, cut_newest, lose_checkpoints, link, odd_result,
    )
}  # fmt: skip
"""Each damages a folder and says whether a resume must then be refused."""
FINISHED = ("odd_result",)
