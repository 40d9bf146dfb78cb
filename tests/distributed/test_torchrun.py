"""Runs that torchrun starts: ranks that die, signals, restarts, and what is refused."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mixfed.cli.common import Interrupts
from mixfed.errors import RunStopped
from tests.cli.tools import environment, here, lines, refused

RUN = ["run", "lg-digits", "--executor", "loop", "--deterministic-sum", "--rounds", "60"]
SETTINGS = [
    "data.partition.clients=12",
    "cohort=5",
    "evaluate.every=1",
    "checkpoint.every=3",
    "evaluate.sets=['local']",
]
SETTINGS += ["data.own_test=0.3", "algorithms.lg_fedavg.warm_start=2"]
COMMAND = [*RUN, *(word for setting in SETTINGS for word in ("--set", setting))]
SENTENCE = re.compile(
    r"Another rank was lost, so rank \d of 2 stopped too\. The last good checkpoint is in .*checkpoints"
)


def torchrun(*arguments: str | Path, ranks: int = 2, restarts: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
    command += ["--max-restarts", str(restarts), "-m", "mixfed", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())


def rank_of(process: subprocess.Popen[str], rank: int) -> int:
    """The process of a rank, by its environment."""
    for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        if f"\0RANK={rank}\0" in Path(f"/proc/{child}/environ").read_text():
            return int(child)
    raise AssertionError(f"no rank {rank} of {process.pid}")


def when_at(folder: Path, rounds: int, process: subprocess.Popen[str]) -> None:
    """Waits until the run has come so far."""
    end = time.monotonic() + 120
    while lines(folder) < rounds:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "nothing happened for too long"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run in one process, without any interruption."""
    out = tmp_path_factory.mktemp("straight") / "run"
    here(*COMMAND, "--out", out)
    return out


def assert_same(out: Path, straight: Path) -> None:
    """The same bytes, the same ledger, and metrics but for round-off: clients' own models are evaluated by rank."""
    assert (out / "model.safetensors").read_bytes() == (straight / "model.safetensors").read_bytes()
    one, other = (json.loads((folder / "result.json").read_text()) for folder in (out, straight))
    assert one["ledger"] == other["ledger"]
    assert one["metrics"] == pytest.approx(other["metrics"], rel=1e-6)
    assert lines(out) == lines(straight) == 60


def test_killed_stopped_and_resumed_with_other_ranks(tmp_path: Path, straight: Path) -> None:
    """Rank 1 is killed, then two ranks go on until a signal stops them, then one process has the rest."""
    out = tmp_path / "run"
    process = torchrun(*COMMAND, "--out", out)
    when_at(out, 5, process)
    os.kill(rank_of(process, 1), signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0
    assert len(SENTENCE.findall(err)) == 1, err
    done = lines(out)
    process = torchrun(*COMMAND, "--out", out, "--resume")
    when_at(out, done + 2, process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    stopped = re.search(r"Stopped after round (\d+) of 60; go on with: torchrun --nproc-per-node 2 -m mixfed run", err)
    assert stopped, err
    assert lines(out) == int(stopped[1])
    here(*COMMAND, "--out", out, "--resume")
    assert_same(out, straight)


def test_restarted_by_itself(tmp_path: Path, straight: Path) -> None:
    """Rank 0, which writes, is killed; torchrun starts both ranks anew, and they go on."""
    out = tmp_path / "run"
    process = torchrun(*COMMAND, "--out", out, "--json", restarts=1)
    when_at(out, 5, process)
    os.kill(rank_of(process, 0), signal.SIGKILL)
    told, err = process.communicate(timeout=180)
    assert process.returncode == 0, err
    assert json.loads(told.splitlines()[-1])["rounds"] == 60
    assert_same(out, straight)
    assert torch.equal(*(load_file(folder / "model.safetensors")["1.weight"] for folder in (out, straight)))


@pytest.mark.parametrize("started", [True, False])
def test_a_signal_does_not_cut_off_what_a_failed_rank_says(monkeypatch: pytest.MonkeyPatch, started: bool) -> None:
    """torchrun sends SIGTERM as soon as another rank has died, perhaps before this one has said so."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none") if started else monkeypatch.delenv("TORCHELASTIC_RUN_ID", False)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(RunStopped), Interrupts():
            raise RunStopped("Another rank was lost")
        assert (signal.getsignal(signal.SIGTERM) == signal.SIG_IGN) == started
    finally:
        signal.signal(signal.SIGTERM, before)


THREADS = """
from pathlib import Path
names = [(thread / "comm").read_text() for thread in Path("/proc/self/task").iterdir()]
assert not any("gloo" in name for name in names), names  # one that is left may abort the process when Python ends
"""


def test_the_script_of_the_page(tmp_path: Path) -> None:
    """docs/scale.md, as a reader follows it: a store in parts, and a script on two ranks."""
    page = (Path(__file__).parents[2] / "docs" / "scale.md").read_text("utf-8")
    (store,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (script,) = re.findall(r"^```py\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "train.py").write_text(script + THREADS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    for words in ([sys.executable, "-c", store], command):
        done = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
    assert float(re.fullmatch(r"accuracy ([\d.]+)\n", done.stdout)[1]) > 0.9  # type: ignore[index]


def test_what_has_no_ranks_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert "start it without torchrun" in refused(capsys, "compare", "digits", "--algorithms", "fedavg")
    assert "leave out torchrun" in refused(capsys, "run", "lg-synthetic")
    assert "'simulator.timeout' must be" in refused(capsys, "run", "digits", "--set", "simulator.timeout=0")
