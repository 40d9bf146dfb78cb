"""The text source: characters and numbers, pieces of fixed length, and its two sides in a scenario."""

from __future__ import annotations

import gzip
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mixfed.cli.ownership import holdings_table
from mixfed.data import load_source
from mixfed.data.sources.chat_wiki import VOCABULARY, encode
from mixfed.errors import InputError
from mixfed.experiments.build import build
from mixfed.experiments.scenario import build_scenario
from mixfed.experiments.toml import resolve
from tests.tiny_sources import write_chat_wiki

DIGITS: dict[str, Any] = {
    "data": {"source": "digits", "partition": {"clients": 10}},
    "client": {"steps": 1},
    "central": {"steps": 1},
}


def decode(numbers: np.ndarray) -> str:
    return "".join(VOCABULARY[number] if number else "?" for number in numbers)


def table(folder: Path, **more: object) -> dict[str, object]:
    data = {"source": "chat-wiki", "folder": str(folder), "length": 10, "min_messages": 2, "held_out": 0.25}
    return {
        "data": data | {"partition": {"kind": "natural"}, "central": {"kind": "source"}},
        "model": {"name": "gru", "embedding": 4, "hidden": 8},
        "client": {"batch_size": 2, "steps": 2},
        "central": {"batch_size": 4, "steps": 2},
        "evaluate": {"every": 1, "sets": ["all", "clients", "centre"]},
        "rounds": 1,
        "cohort": 2,
        **more,
    }


def test_every_character_has_a_number() -> None:
    assert len(VOCABULARY) == 97
    assert decode(encode("To be,\nor ~not~?")) == "To be,\nor ~not~?"
    assert encode("\n a").tolist() == [1, 2, VOCABULARY.index("a")]
    assert encode("é—\t\x00😀\ud800").tolist() == [0] * 6
    assert encode("a").dtype == np.uint8


def test_pieces_are_shifted_by_one_and_nothing_is_padded(tmp_path: Path) -> None:
    write_chat_wiki(tmp_path)
    source = load_source("chat-wiki", tmp_path, length=10, min_messages=2)
    assert source.natural_clients is not None
    x, y = (source.train[name][source.natural_clients["train"] == "user 0"] for name in ("x", "y"))
    whole = 'message 0 of user 0, "well".\nmessage 1 of user 0, "well"?\nmessage 2 of user 0, "well"!'
    assert x.dtype == y.dtype == np.uint8
    assert decode(x.reshape(-1)) == whole[: 10 * len(x)]
    assert decode(y.reshape(-1)) == whole[1 : 10 * len(x) + 1]
    assert len(x) == (len(whole) - 1) // 10


def test_the_centre_has_articles_without_their_titles(tmp_path: Path) -> None:
    write_chat_wiki(tmp_path)
    source = load_source("chat-wiki", tmp_path, length=10, min_messages=2)
    assert source.centre is not None
    assert source.centre.people is not None
    assert np.unique(source.centre.people).tolist() == [f"Article {number}" for number in range(8)]
    first = source.centre.rows(np.flatnonzero(source.centre.people == "Article 3"))
    assert decode(first.arrays["x"].reshape(-1)).startswith("Article 3 is long.\nIt has == a part ==")


def test_bots_and_users_of_few_messages_are_left_out(tmp_path: Path) -> None:
    write_chat_wiki(tmp_path)
    for minimum, users in ((1, 9), (2, 8), (3, 8)):
        source = load_source("chat-wiki", tmp_path, length=10, min_messages=minimum)
        assert source.natural_clients is not None
        assert len(np.unique(source.natural_clients["train"])) == users
    with pytest.raises(InputError, match="no user has more than 10 characters"):
        load_source("chat-wiki", tmp_path, length=10, min_messages=4)
    with pytest.raises(InputError, match="at least 1, not 0"):
        load_source("chat-wiki", tmp_path, length=0)


def test_files_may_be_plain_and_wikitext_headings_will_do(tmp_path: Path) -> None:
    write_chat_wiki(tmp_path)
    text = tmp_path / "text"
    for name in ("ubuntu_irc_by_user.csv", "wikipedia_excerpt.txt"):
        (text / name).write_bytes(gzip.decompress((text / f"{name}.gz").read_bytes()))
        (text / f"{name}.gz").unlink()
    (text / "wikipedia_excerpt.txt").write_text(
        " \n = One = \n \n Words and words . \n = = Part = = \n More words . \n"
    )
    source = load_source("chat-wiki", tmp_path, length=10, min_messages=2)
    assert source.centre is not None
    assert source.centre.people is not None
    assert set(source.centre.people) == {"One"}


@pytest.mark.parametrize(
    ("name", "content"),
    [("ubuntu_irc_by_user.csv", "who,said\na,b\n"), ("ubuntu_irc_by_user.csv", 'user,text\na,"b'),
     ("ubuntu_irc_by_user.csv", "text,user\nb\n"), ("wikipedia_excerpt.txt", "Words without a title.\n")],
)  # fmt: skip
def test_a_file_of_another_form_is_named(tmp_path: Path, name: str, content: str) -> None:
    write_chat_wiki(tmp_path)
    (tmp_path / "text" / name).write_text(content)
    with pytest.raises(InputError, match=rf"{name}' cannot be read"):
        load_source("chat-wiki", tmp_path, length=10, min_messages=2)


def test_held_out_users_and_articles_are_the_two_sides_of_the_test(tmp_path: Path) -> None:
    write_chat_wiki(tmp_path)
    scenario = build_scenario(resolve(table(tmp_path)))
    assert len(scenario.clients) == 6
    assert scenario.central is not None
    chat, wiki = (scenario.part("test", side) for side in ("clients", "centre"))
    assert len(chat) + len(wiki) == len(scenario.part("test", "all")) == len(scenario.test)
    assert all("rticle" not in decode(row) for row in chat.arrays["x"])
    ours = {row.tobytes() for row in scenario.central.arrays["x"]}
    assert sum(row.tobytes() in ours for row in wiki.arrays["x"]) < len(wiki)
    with pytest.raises(InputError, match="no validation part"):
        scenario.part("validation", "all")


def test_validation_takes_from_both_sides(tmp_path: Path) -> None:
    write_chat_wiki(tmp_path)
    given = table(tmp_path, evaluate={"on": "validation", "sets": ["clients", "centre"]})
    given["data"] |= {"validation": 0.2}  # type: ignore[operator]
    scenario = build_scenario(resolve(given))
    assert len(scenario.clients) == 5
    assert scenario.validation is not None
    assert len(scenario.part("validation", "clients")) + len(scenario.part("validation", "centre")) == len(
        scenario.validation
    )


@pytest.mark.parametrize("algorithm", ["fedavg", "parallel", "gradient_1way", "gradient_2way", "oracle"])
def test_a_run_measures_each_side(tmp_path: Path, algorithm: str) -> None:
    write_chat_wiki(tmp_path)
    experiment = build(resolve(table(tmp_path, algorithm=algorithm)))
    found = experiment.run().metrics
    assert set(found) == {f"{m}{s}" for m in ("loss", "accuracy") for s in ("", "_clients", "_centre")}
    sizes = [len(experiment.scenario.part("test", side)) for side in ("clients", "centre")]
    both = np.average([found["accuracy_clients"], found["accuracy_centre"]], weights=sizes)
    assert found["accuracy"] == pytest.approx(both)


def test_without_its_centre_there_is_one_side(tmp_path: Path) -> None:
    write_chat_wiki(tmp_path)
    given = table(tmp_path)
    given["data"] |= {"central": {"kind": "none"}}  # type: ignore[operator]
    with pytest.raises(InputError, match="so there is no evaluation set 'clients'"):
        build(resolve(given))
    with pytest.raises(InputError, match="'digits' has nothing for the centre"):
        build_scenario(resolve(DIGITS | {"data": DIGITS["data"] | {"central": {"kind": "source"}}}))


def test_the_settings_of_a_source_are_checked() -> None:
    with pytest.raises(InputError, match=r"no setting 'data.lenght'; did you mean 'data.length'"):
        resolve({"data": {"source": "chat-wiki", "lenght": 5}})
    with pytest.raises(InputError, match=r"no setting 'data.length'"):
        resolve({"data": {"source": "digits", "length": 5}})
    text = DIGITS | {"data": DIGITS["data"] | {"source": "chat-wiki"}}
    assert resolve(text).data.options == {"length": 100, "min_messages": 20}


def test_who_holds_what_does_not_list_every_character(tmp_path: Path) -> None:
    write_chat_wiki(tmp_path)
    labels = holdings_table("text", build_scenario(resolve(table(tmp_path)))).columns[-1]
    assert all(cell == "" or re.fullmatch(r"\d\d different ones", str(cell)) for cell in labels.cells)
