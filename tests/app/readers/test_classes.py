"""Files that say which label a class has."""

import json
from pathlib import Path

import pytest

from driftfilter.app.readers.classes import number_classes, read_classes


@pytest.mark.parametrize(
    "text",
    [
        "n02\nn01\n\nn03\n",
        "n02 tench, Tinca\nn01 goldfish\nn03 white shark",
        '["n02", "n01", "n03"]',
        '{"0": ["n02", "tench"], "1": ["n01", "goldfish"], "2": ["n03", "shark"]}',
        '{"n01": 1, "n02": 0, "n03": 2}',
    ],
    ids=["lines", "synsets", "list", "keras", "numbers"],
)
def test_all_forms_say_the_same(tmp_path: Path, text: str) -> None:
    (tmp_path / "classes").write_text(text)
    assert read_classes(tmp_path / "classes") == {"n02": 0, "n01": 1, "n03": 2}


@pytest.mark.parametrize(
    "text",
    ["", "n01\nn01", "[1", '{"a": "b"}', '{"a": -1}', '{"0": []}', "[" * 100_000],
    ids=["empty", "twice", "cut", "names", "negative", "nameless", "deep"],
)
def test_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "classes").write_text(text)
    with pytest.raises(ValueError, match=r"--classes .*classes must be names of classes"):
        read_classes(tmp_path / "classes")
    with pytest.raises(ValueError, match=r"--classes must be a file that is there, got .*nowhere"):
        read_classes(tmp_path / "nowhere")


def test_several_names_may_share_a_label(tmp_path: Path) -> None:
    (tmp_path / "classes").write_text(json.dumps({"hen": 0, "cock": 0, "owl": 1}))
    assert number_classes(Path(), ["owl", "hen"], read_classes(tmp_path / "classes")) == {
        "hen": 0,
        "owl": 1,
    }


def test_a_name_that_is_unknown_gets_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"one of the 2 of --classes .did you mean 'horse'"):
        number_classes(Path("data"), ["hors"], {"horse": 0, "dog": 1})
