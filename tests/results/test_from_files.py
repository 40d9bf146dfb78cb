"""Pages are written from stored results, and the check says where they are not."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from mixfed.errors import InputError
from mixfed.experiments.reproduce.blocks import Found
from mixfed.experiments.reproduce.check import problems
from mixfed.experiments.reproduce.definition import Definition, load
from mixfed.experiments.reproduce.figures import draw, is_current
from mixfed.experiments.reproduce.pages import finder, pages_in, rendered, rewrite, tables_by_hand
from mixfed.experiments.reproduce.papers import all_claims
from mixfed.experiments.reproduce.runs import judge_again
from mixfed.experiments.reproduce.store import Store, Stored
from mixfed.experiments.texts import packaged
from tests.results.tiny import made_up, tiny, write

ROOT = Path(__file__).parents[2]


def found(tmp_path: Path, figures: dict[str, list[float]] | None = None) -> Found:
    definition = load(str(tiny(tmp_path)))
    stored = made_up(definition, figures or {"FedAvg": [0.40, 0.44], "Oracle": [0.51, 0.53]})

    def find(name: str) -> tuple[Definition, Stored]:
        assert name == "tiny"
        return definition, stored

    return find


def page(text: str, find: Found) -> str:
    return rendered(text, find, "page.md")


def test_the_repository_agrees_with_itself_in_less_than_a_minute() -> None:
    began = time.perf_counter()
    assert problems(Store(ROOT / "results"), ROOT / "docs") == []
    assert time.perf_counter() - began < 60


def test_no_file_is_large() -> None:
    sizes = [path.stat().st_size for path in (ROOT / "results").glob("*.json")]
    assert sum(sizes) < 1_000_000


def test_a_table_of_methods(tmp_path: Path) -> None:
    text = "<!-- table tiny methods @ fast: paper accuracy as paper; accuracy as here; loss -->\nold\n<!-- end -->\n"
    made = page(text, found(tmp_path))
    assert "| FedAvg | 0.500 | 0.420 ± 0.028 | 0.580 ± 0.028 |" in made
    assert "| Oracle | – | 0.520 ± 0.014 |" in made
    assert page(made, found(tmp_path)) == made


def test_what_a_run_does_not_measure_is_no_run_that_stopped(tmp_path: Path) -> None:
    find = found(tmp_path)
    text = "<!-- table tiny methods @ fast: accuracy; G2 -->\n<!-- end -->\n"
    assert "| FedAvg | 0.420 ± 0.028 | – |" in page(text, find)
    runs = find("tiny")[1].runs
    for key in runs:
        runs[key] |= {"stopped": "every update was not finite"}
    assert "| FedAvg | stopped | stopped |" in page(text, find)


def test_tables_of_cells_and_labels_and_claims(tmp_path: Path) -> None:
    find = found(tmp_path)
    assert "| slow | 0.420 ± 0.028 | 0.520 ± 0.014 |" in page("<!-- table tiny cells -->\n<!-- end -->", find)
    made = page("<!-- table tiny labels -->\n<!-- end -->", find)
    assert "|  | slow | fast: paper | here |" in made
    made = page("<!-- claims tiny -->\n<!-- end -->", find)
    assert "| The oracle is ahead | **holds partly** |" in made  # two seeds: t is 12.7


def test_who_is_ahead_in_every_cell_and_by_how_much(tmp_path: Path) -> None:
    block = "<!-- winners tiny accuracy -->\n<!-- end -->"
    unsure = page(block, found(tmp_path))
    assert "| slow | Oracle | 0.520 ± 0.014 | FedAvg | 0.100 ± 0.127 |" in unsure  # two seeds: t is 12.7
    assert "Ahead: Oracle in 2 of 2 cells." in unsure
    sure = page(block, found(tmp_path, {"FedAvg": [0.40, 0.44], "Oracle": [0.50, 0.542]}))
    assert "| slow | **Oracle** | 0.521 ± 0.030 | FedAvg | 0.101 ± 0.013 |" in sure
    by_loss = page("<!-- winners tiny loss: FedAvg; Oracle -->\n<!-- end -->", found(tmp_path))
    assert "| fast | Oracle | 0.480 ± 0.014 | FedAvg | 0.100 ± 0.127 |" in by_loss
    incomplete = found(tmp_path)
    runs = incomplete("tiny")[1].runs
    for key in [key for key in runs if key.label == "Oracle" and key.cell == "fast"]:
        del runs[key]
    assert "Ahead: Oracle in 1 of 2 cells; 1 are not complete." in page(block, incomplete)
    assert "| fast |" not in page(block, incomplete)
    with pytest.raises(InputError, match="did you mean 'Oracle'"):
        page("<!-- winners tiny accuracy: Oracel -->\n<!-- end -->", found(tmp_path))


def test_numbers_in_prose(tmp_path: Path) -> None:
    find = found(tmp_path)
    for arguments, told in {
        "tiny | FedAvg @ fast | accuracy": "0.420 ± 0.028",
        "tiny | FedAvg @ fast | accuracy | mean": "0.420",
        "tiny | FedAvg | accuracy | values": "0.400, 0.440",
        "tiny | FedAvg | accuracy | greatest": "0.440",
        "tiny | FedAvg @ fast | accuracy | paper": "0.500",
        "tiny | Oracle - FedAvg | accuracy | mean": "0.100",
        "tiny | FedAvg - Oracle | accuracy | mean": "−0.100",
    }.items():
        assert page(f"It has <!-- n {arguments} -->?<!-- /n -->.", find).endswith(f"-->{told}<!-- /n -->.")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("<!-- table tiny rows -->\n<!-- end -->", "methods|cells|labels"),
        ("<!-- tabel tiny methods -->\n<!-- end -->", "a block is one of"),
        ("<!-- table tiny methods @ faster -->\n<!-- end -->", "no cell 'faster'"),
        ("<!-- n tiny | FedAvg | accuracy -->0.4<!-- /n -->", "begins a line"),
        ("It has <!-- n tiny | FedAvg -->0.4<!-- /n -->", "EXPERIMENT | LABEL | METRIC"),
        ("<!-- summary other -->\n<!-- end -->", "the papers are"),
        ("<!-- figure tiny picture.gif: words -->\n<!-- end -->", "a figure is"),
    ],
)
def test_comments_that_say_nothing_are_refused_in_a_sentence(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(InputError) as error:
        page(text, found(tmp_path))
    assert told in str(error.value)


def test_what_is_shown_as_code_stays(tmp_path: Path) -> None:
    text = "```\n<!-- table tiny methods -->\n<!-- end -->\n```\n"
    assert page(text, found(tmp_path)) == text


def test_tables_by_hand_are_seen() -> None:
    table = "| a | b |\n|---|---:|\n| 1 | 2 |\n"
    assert tables_by_hand(table) == 1
    assert tables_by_hand(f"<!-- table tiny methods -->\n\n{table}\n<!-- end -->\n") == 0


def test_a_picture_knows_what_it_shows(tmp_path: Path) -> None:
    arguments = "tiny picture.png accuracy: the accuracy"
    find = found(tmp_path)
    assert not is_current(arguments, find, tmp_path)
    assert draw([arguments], find, tmp_path) == ["picture.png"]
    assert is_current(arguments, find, tmp_path)
    assert draw([arguments], find, tmp_path) == []
    other = found(tmp_path, {"FedAvg": [0.41, 0.44], "Oracle": [0.51, 0.53]})
    assert not is_current(arguments, other, tmp_path)


def test_an_edited_page_and_an_edited_verdict_are_told(tmp_path: Path) -> None:
    """With a copy of the packaged results, and a page of them."""
    store, docs = Store(tmp_path / "results"), tmp_path / "docs"
    store.folder.mkdir()
    store.path("digits").write_bytes((ROOT / "results" / "digits.json").read_bytes())
    docs.mkdir()
    (docs / "results-digits.md").write_text("<!-- table digits methods: accuracy -->\n<!-- end -->\n", encoding="utf-8")
    assert rewrite(store, docs) == pages_in(docs)
    assert problems(store, docs) == []
    text = (docs / "results-digits.md").read_text(encoding="utf-8")
    (docs / "results-digits.md").write_text(text.replace("| FedAvg | 4", "| FedAvg | 9"), encoding="utf-8")
    assert "is not what the stored results say" in problems(store, docs)[0]
    (docs / "results-digits.md").write_text(text + "\n| a | b |\n|---|---|\n| 1 | 2 |\n", encoding="utf-8")
    assert "tables that no stored run is behind" in problems(store, docs)[0]
    table = json.loads(store.path("digits").read_text())
    table["claims"][0]["verdict"] = "does not hold"
    store.path("digits").write_text(json.dumps(table))
    assert "do not follow from its numbers" in problems(store, docs)[0]


def test_verdicts_of_other_claims_are_written_anew(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.path("digits").write_bytes((ROOT / "results" / "digits.json").read_bytes())
    before = store.read("digits")
    table = json.loads(store.path("digits").read_text())
    store.path("digits").write_text(json.dumps(table | {"claims": table["claims"][1:]}))
    assert judge_again(store) == ["digits"]
    assert store.read("digits") == before
    assert judge_again(store) == []


def test_a_file_without_a_definition_is_told(tmp_path: Path) -> None:
    store = Store(tmp_path / "results")
    write(store, tiny(tmp_path), {"FedAvg": [0.4, 0.42], "Oracle": [0.5, 0.521]})
    assert "There is no experiment 'tiny'" in problems(store)[0]


def test_every_claim_of_the_papers_has_a_test_and_is_on_the_page() -> None:
    tested = {claim.id for name in packaged("reproductions") for claim in load(name).claims if claim.id}
    assert tested == {claim.id for claim in all_claims().values() if claim.id in tested or not claim.note}
    text = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
    assert all(claim.text in text for claim in all_claims().values())


def test_every_experiment_is_on_a_page_or_in_the_list_of_what_it_needs() -> None:
    """With its figures and its verdicts; of what needs more than is at hand the command and the cost are enough."""
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("results*.md"))
    claims = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
    for name in packaged("reproductions"):
        shown = all(f"<!-- {kind} {name} " in pages for kind in ("table", "claims"))
        listed = bool(load(name).needs) and f"| `mixfed reproduce {name} --data DIR` | " in claims
        assert shown or listed, name


def test_what_needs_more_is_listed_with_its_command_and_its_cost(tmp_path: Path) -> None:
    """100 h a run: five methods with three seeds are 1,500 h."""
    made = page("<!-- needed -->\n<!-- end -->", finder(Store(tmp_path)))
    assert "| `mixfed reproduce language-paper --data DIR` | 0 of 15 | 1,500 h |" in made
    assert "mixfed reproduce digits " not in made
