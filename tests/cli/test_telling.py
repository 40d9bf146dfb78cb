"""How much a command tells: results always, progress and remarks as wanted."""

from __future__ import annotations

from pathlib import Path

from .tools import TINY, mixfed

RUN = ["run", "digits", "--rounds", "2", *TINY]


def test_quiet_shows_results_only(tmp_path: Path) -> None:
    plain, quiet = (mixfed(*first, *RUN, "--out", tmp_path / str(i)) for i, first in enumerate(([], ["--quiet"])))
    assert "2/2" in plain.stderr
    assert quiet.stderr == ""
    assert "accuracy" in quiet.stdout
    refused = mixfed("--quiet", "run", "nonsuch", expect=2)
    assert "nonsuch" in refused.stderr


def test_it_may_be_said_after_the_command_too(tmp_path: Path) -> None:
    quiet = mixfed(*RUN, "--quiet", "--out", tmp_path / "a")
    assert quiet.stderr == ""
    assert "accuracy" in quiet.stdout
    both = mixfed("--quiet", *RUN, "--verbose", "--out", tmp_path / "b")
    assert both.stderr == "", "who asks for silence gets it"
    for command in (["list"], ["report"], ["flower", "local"]):
        assert "--quiet" in mixfed(*command, "--help").stdout


def test_completion_is_offered() -> None:
    assert "--install-completion" in mixfed("--help").stdout
