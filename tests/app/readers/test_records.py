"""Rows with named columns: tables, texts, lists of pictures."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from driftfilter.app.readers.columns import Columns
from driftfilter.app.readers.records import open_records
from driftfilter.app.readers.stored import Shift, Stored
from small_data import (
    make_table,
    make_tokens,
    pixels,
    save_picture,
    write_csv,
    write_lines,
    write_table,
    write_tokens,
)

CPU = torch.device("cpu")


def raw(data: Stored, name: str = "stream") -> Any:
    """All samples under a domain as they lie."""
    return data.rows[Shift(name)](np.arange(len(data.labels)))


def opened(path: Path, columns: str = "", **rest: Any) -> Stored:
    return open_records(path, Columns.parse(columns), **rest)


# Tables


def write_parquet(path: Path, n: int = 24) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    values, labels, domains = make_table(n)
    columns = {name: values[:, number] for number, name in enumerate("abcd")}
    table = pyarrow.table({**columns, "label": labels, "domain": domains})
    parquet.write_table(table, path, row_group_size=10)


WRITERS = {"table.csv": write_table, "table.parquet": write_parquet}


@pytest.mark.parametrize("name", WRITERS)
def test_tables_are_numbers_in_the_order_of_the_file(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    values, labels, domains = make_table()
    data = opened(tmp_path / name)
    assert data.labels.tolist() == labels.tolist()
    assert data.shifts == ("plant0", "plant1", "plant2")
    assert data.members is not None
    for place, index in data.members.items():
        assert index.tolist() == [i for i, each in enumerate(domains) if each == place]
        taken = data.take(Shift(place), index, CPU)
        assert isinstance(taken, torch.Tensor)
        assert torch.equal(taken, torch.from_numpy(values[index]))
        assert taken.dtype == torch.float32


def test_lines_of_json_are_a_table_too(tmp_path: Path) -> None:
    rows = [{"a": 1, "b": 2.5, "label": "up"}, {"a": 3, "b": -1, "label": "down"}]
    write_lines(tmp_path / "t.jsonl", rows)
    data = opened(tmp_path / "t.jsonl")
    assert raw(data).tolist() == [[1, 2.5], [3, -1]]
    assert (data.labels.tolist(), data.counted) == ([1, 0], ("down", "up"))


def test_rows_may_be_sorted_by_time(tmp_path: Path) -> None:
    """By numbers if they are some, else as text; equal times stay in their order."""
    rows = [[3, 10, 0], [1, 9, 1], [4, 10, 2], [2, -1, 1]]
    write_csv(tmp_path / "t.csv", "a,when,label", rows)
    data = opened(tmp_path / "t.csv", "time=when")
    assert raw(data).tolist() == [[2], [1], [3], [4]]
    assert data.labels.tolist() == [1, 1, 0, 2]
    days = ["2024-02-01", "2023-12-31", "2024-02-01", "2024-01-05"]
    write_csv(
        tmp_path / "t.csv",
        "a,when,label,domain",
        [[a, day, label, day[:4]] for (a, _, label), day in zip(rows, days, strict=True)],
    )
    data = opened(tmp_path / "t.csv", "time=when")
    assert raw(data, "2024").tolist() == [[1], [2], [3], [4]]
    assert data.shifts == ("2023", "2024")


def test_where_keeps_rows_and_drop_columns(tmp_path: Path) -> None:
    """What is not read may hold anything; a column without a name is an index, and is not read."""
    rows = [[0, 1, "x", "test", 0], [1, "?", "y", "train", 1], [2, 3, "z", "test", 2]]
    write_csv(tmp_path / "t.csv", ",a,note,split,y", rows)
    data = opened(tmp_path / "t.csv", "label=y,where=split:test,drop=note")
    assert raw(data).tolist() == [[1], [3]]
    assert data.labels.tolist() == [0, 2]


def test_dropped_columns_mean_nothing(tmp_path: Path) -> None:
    """Not even what columns of their name mean by themselves, and with every meaning given."""
    rows = [[9, 1, "a", "w", 0, 5, "test"], [8, 2, "b", "w", 1, 4, "test"]]
    write_csv(tmp_path / "t.csv", ",a,domain,text,label,day,split", rows)
    data = opened(tmp_path / "t.csv", "drop=domain+text+day+split")
    assert data.shifts == ("stream",)
    assert raw(data).tolist() == [[1], [2]]
    given = "label=label,domain=domain,time=day,where=split:test,drop=text"
    assert raw(opened(tmp_path / "t.csv", given), "b").tolist() == [[2], [1]]


@pytest.mark.parametrize(
    ("cells", "expected", "counted"),
    [
        (["0", "1", "2"], [0, 1, 2], None),
        (["2.0", "10.0", "0.0"], [2, 10, 0], None),  # as pandas writes a column with gaps
        (["wake", "sleep", "wake"], [1, 0, 1], ("sleep", "wake")),
        (["True", "False", "True"], [1, 0, 1], ("False", "True")),
        (["v1.0", "v2.0", "v1.0"], [0, 1, 0], ("v1.0", "v2.0")),
    ],
    ids=["whole", "pandas", "names", "truth", "versions"],
)
def test_labels(
    tmp_path: Path, cells: list[str], expected: list[int], counted: tuple[str, ...] | None
) -> None:
    write_csv(tmp_path / "t.csv", "a,label", [[0, cell] for cell in cells])
    data = opened(tmp_path / "t.csv")
    assert (data.labels.tolist(), data.counted) == (expected, counted)


def test_labels_may_be_given_other_numbers(tmp_path: Path) -> None:
    """Stars from 1 to 5, for a model that counts from 0."""
    write_csv(tmp_path / "t.csv", "a,label", [[0, 5.0], [0, 1.0], [0, 3.0]])
    data = opened(tmp_path / "t.csv", numbers={str(star): star - 1 for star in range(1, 6)})
    assert data.labels.tolist() == [4, 0, 2]


def test_reports_tell_apart_what_was_read(tmp_path: Path) -> None:
    write_table(tmp_path / "t.csv")
    first, second = (opened(tmp_path / "t.csv", text).describe() for text in ("", "drop=a"))
    assert first["sha256"] == second["sha256"]
    assert first["read"] != second["read"]


CSV: dict[str, tuple[str, str, str]] = {
    "ragged": ("a,label\n1,0\n1,2,0\n", "", "got 3 cells in line 3 under 2 columns"),
    "text": (
        "a,b,label\n1,2,0\n1,high,0\n",
        "",
        "column 'b' must hold finite numbers, got 'high' in row 3 .--columns drop=b leaves it out",
    ),
    "gap": ("a,label\n,0\n", "", "column 'a' must hold finite numbers, got '' in row 2"),
    "nan": ("a,label\n1,0\nnan,0\n", "", "column 'a' must hold finite numbers, got nan in row 3"),
    "huge": ("a,label\n1e99,0\n", "", "must hold finite numbers"),
    "after where": (
        "a,label,s\n?,0,x\nno,0,y\n",
        "where=s:y",
        "got 'no' in row 3",
    ),
    "empty": ("", "", "must be a header and its rows, got 'no row'"),
    "header alone": ("a,label\n", "", "must be a header and its rows, got 'no row'"),
    "twice": ("a,a,label\n1,2,0\n", "", "columns of one name"),
    "quote": ('a,label\n"1,0\n', "", "must be a file of rows with named columns, got unexpected"),
    "no label": (
        "a,lable\n1,0\n",
        "",
        "column of the label must be one of .*did you mean 'lable'.*--columns label=COLUMN",
    ),
    "no number": ("label\n0\n", "", "columns of numbers, beside the labels"),
    "label gap": ("a,label\n1,0\n1,\n", "", "label must be filled in, got an empty cell in row 3"),
    "label mixed": ("a,label\n1,0\n1,up\n", "", "whole numbers alone, or names alone"),
    "label share": ("a,label\n1,0.5\n", "", "whole numbers alone, or names alone"),
    "label below": ("a,label\n1,-1\n", "", "labels from -1 to -1"),
    "domain": ("a,label,site\n1,0,x\n", "domain=cite", "of the domain .*did you mean 'site'"),
    "time": ("a,label\n1,0\n", "time=day", "column of the time must be one of"),
    "drop": ("a,label\n1,0\n", "drop=a+b", "column of the drop must be one of .*got 'b'"),
    "where": ("a,label\n1,0\n", "where=split:test", "column of the where must be one of"),
    "nowhere": ("a,label,s\n1,0,x\n", "where=s:test", "'test' in some row, got ..x"),
    "text column": ("a,label\n1,0\n", "text=review", "column of the text must be one of"),
    "path column": ("a,label\n1,0\n", "path=x/{file}.png", "column of the path .*got 'file'"),
}


@pytest.mark.parametrize("case", CSV)
def test_refused_tables(case: str, tmp_path: Path) -> None:
    text, columns, message = CSV[case]
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        opened(tmp_path / "t.csv", columns)
    assert str(tmp_path / "t.csv") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("labels=y", "MEANING=COLUMN, with a meaning of label, .*did you mean 'label'"),
        ("label", "--columns must be MEANING=COLUMN"),
        ("where=split", "COLUMN:VALUE, as in split:test"),
        ("path=a,text=b", "--columns text must be left out: path is given"),
    ],
)
def test_refused_columns(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Columns.parse(text)


def test_parquet_needs_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"need pyarrow: pip install 'driftfilter\[parquet\]'"):
        opened(tmp_path / "t.parquet")


def test_a_parquet_file_that_is_none(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "t.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match=r"t\.parquet must be a file of rows with named columns"):
        opened(tmp_path / "t.parquet")


def test_values_of_parquet_that_are_missing(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    def write(**columns: Any) -> Path:
        parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
        return tmp_path / "t.parquet"

    with pytest.raises(ValueError, match="column 'a' must hold finite numbers, got None in row 2"):
        opened(write(a=[1.0, None], label=[0, 1]))
    for missing in (None, float("nan")):
        with pytest.raises(ValueError, match="label must be filled in, got an empty cell in row 1"):
            opened(write(a=[1.0, 2.0], label=[missing, 1.0]))


# Texts and arrays


def test_texts(tmp_path: Path) -> None:
    """A text is what the model's tokenizer gets, whatever else is in the row."""
    rows = [
        {"text": 'Good, "very" good\nindeed', "stars": "pos", "kind": "books", "n": 3},
        {"text": "", "stars": "neg", "kind": "dvd", "n": 4},
    ]
    write_lines(tmp_path / "t.jsonl", rows)
    data = opened(tmp_path / "t.jsonl", "label=stars,domain=kind")
    assert raw(data, "dvd") == ['Good, "very" good\nindeed', ""]
    assert data.labels.tolist() == [1, 0]
    with pytest.raises(ValueError, match=r"a model with a tokenizer: hf:FOLDER"):
        data.take(Shift("dvd"), torch.tensor([1]), CPU)
    (tmp_path / "t.csv").write_text('label,review\n1,"two\nlines"\n0,b\n')
    assert raw(opened(tmp_path / "t.csv", "text=review")) == ["two\nlines", "b"]


def test_arrays_go_by_the_names_of_the_inputs(tmp_path: Path) -> None:
    """Shorter ones are filled up with 0, and a column is of one kind in every batch."""
    write_tokens(tmp_path / "t.jsonl")
    texts, labels, _ = make_tokens()
    data = opened(tmp_path / "t.jsonl")
    assert data.shifts == ("books", "kitchen")
    assert data.labels.tolist() == labels.tolist()
    taken = data.take(Shift("books"), torch.tensor([0, 2]), CPU)
    assert isinstance(taken, dict)
    assert taken["input_ids"].tolist() == [[*texts[0], 0, 0], texts[2]]
    assert taken["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1] * 5]
    assert {each.dtype for each in taken.values()} == {torch.int64}
    rows = [{"x": [1, 2], "label": 0}, {"x": [0.5, 1], "label": 1}]
    write_lines(tmp_path / "t.jsonl", rows)
    one = opened(tmp_path / "t.jsonl").take(Shift("stream"), torch.tensor([0]), CPU)
    assert isinstance(one, dict)
    assert one["x"].dtype == torch.float32


LINES: dict[str, tuple[str, str]] = {
    "cut": ('{"text": "a", "label": 0}\n{"text": "b", "la', "must be a file of rows"),
    "no object": ('{"text": "a", "label": 0}\n[1]\n', "other names in line 2 than in the first"),
    "names": ('{"text": "a", "label": 0}\n{"label": 0}\n', "other names in line 2"),
    "number": ('{"text": 3, "label": 0}\n', "text must be texts, got 3 in row 1"),
    "null": ('{"text": "a", "label": null}\n', "got an empty cell in row 1"),
    "array": ('{"x": [1], "label": 0}\n{"x": 2, "label": 0}\n', "x must be a list of finite num"),
    "nested": ('{"x": [[1]], "label": 0}\n', "x must be a list of finite numbers"),
    "empty array": ('{"x": [], "label": 0}\n', "x must be a list of finite numbers"),
    "infinite": ('{"x": [Infinity], "label": 0}\n', "x must be a list of finite numbers"),
    "beyond": (f'{{"x": [{10**30}], "label": 0}}\n', "x must be a list of finite numbers"),
    "deep": ("[" * 100_000, "must be a file of rows"),
    "nothing": ("\n", "must be a header and its rows"),
}


@pytest.mark.parametrize("case", LINES)
def test_refused_lines(case: str, tmp_path: Path) -> None:
    text, message = LINES[case]
    (tmp_path / "t.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        opened(tmp_path / "t.jsonl")
    assert "t.jsonl" in str(caught.value)


def test_a_file_in_another_encoding(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"a,label\n\xff\xfe,0\n")
    with pytest.raises(ValueError, match=r"t\.csv must be a file of rows"):
        opened(tmp_path / "t.csv")


# Lists of pictures


def same(data: Stored, name: str, seeds: list[int]) -> bool:
    found = raw(data, name)
    return len(found) == len(seeds) and all(
        np.array_equal(each, pixels(seed)) for each, seed in zip(found, seeds, strict=True)
    )


def test_wilds(tmp_path: Path) -> None:
    """Camelyon17: the path of a picture is made of several columns."""
    rows = []
    for number in range(6):
        patient, node, x, y = f"{4 + number:03}", number % 2, 10 * number, 7
        name = f"patch_patient_{patient}_node_{node}_x_{x}_y_{y}.png"
        save_picture(tmp_path / "patches" / f"patient_{patient}_node_{node}" / name, number)
        rows.append([number, patient, node, x, y, number % 2, number // 2, int(number > 1)])
    write_csv(tmp_path / "metadata.csv", ",patient,node,x_coord,y_coord,tumor,center,split", rows)
    pattern = (
        "patches/patient_{patient}_node_{node}/"
        "patch_patient_{patient}_node_{node}_x_{x_coord}_y_{y_coord}.png"
    )
    data = opened(
        tmp_path / "metadata.csv", f"label=tumor,domain=center,where=split:1,path={pattern}"
    )
    assert data.shifts == ("1", "2")
    assert data.labels.tolist() == [0, 1, 0, 1]
    assert same(data, "1", [2, 3, 4, 5])


def test_paths_and_labels_in_a_text_file(tmp_path: Path) -> None:
    """DomainNet: the first folder is the domain."""
    for seed, name in enumerate(("clipart/bee/a.jpg", "real/the bee/b.jpg", "clipart/bus/c.jpg")):
        save_picture(tmp_path / name, seed)
    text = "clipart/bee/a.jpg 0\nreal/the bee/b.jpg 0\nclipart/bus/c.jpg 1\n"
    (tmp_path / "all_test.txt").write_text(text)
    data = opened(tmp_path / "all_test.txt")
    assert data.shifts == ("clipart", "real")
    assert data.members is not None
    assert data.members["clipart"].tolist() == [0, 2]
    assert data.labels.tolist() == [0, 0, 1]
    assert same(data, "real", [0, 1, 2])
    (tmp_path / "all_test.txt").write_text("clipart/bee/a.jpg\n")
    with pytest.raises(ValueError, match="in line 1: no picture and label"):
        opened(tmp_path / "all_test.txt")


def test_refused_lists(tmp_path: Path) -> None:
    save_picture(tmp_path / "a.png", 0)
    write_csv(tmp_path / "t.csv", "path,label", [["a.png", 0], ["b.png", 1]])
    with pytest.raises(ValueError, match=r"t\.csv must name pictures .* got 'b\.png' in row 3"):
        opened(tmp_path / "t.csv")
    save_picture(tmp_path / "b.png", 1, (20, 30))
    with pytest.raises(ValueError, match=r"b\.png must be 32x32 pixels"):
        opened(tmp_path / "t.csv")
    assert len(opened(tmp_path / "t.csv", fitted=True).labels) == 2
