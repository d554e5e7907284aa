"""The script of docs/data.md, on files in the shape of UCI's human activity."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from driftfilter.app.datasets.table import DATA_SETS
from driftfilter.app.readers.windows import open_windows

PAGE = Path(__file__).parents[2] / "docs" / "data.md"


def test_human_activity_becomes_windows(tmp_path: Path) -> None:
    found: dict[str, Any] = {}
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(compile(block, "data.md", "exec"), found)
    assert len(found["SIGNALS"]) == 9
    random, source = np.random.default_rng(0), tmp_path / "UCI HAR Dataset"
    people = {"train": [1, 3, 1], "test": [2]}
    values: dict[str, Any] = {}
    for part, who in people.items():
        (source / part / "Inertial Signals").mkdir(parents=True)
        values[part] = random.normal(size=(len(who), 9, 128)).astype(np.float32)
        for number, name in enumerate(found["SIGNALS"]):
            file = source / part / "Inertial Signals" / f"{name}_{part}.txt"
            np.savetxt(file, values[part][:, number])
        np.savetxt(source / part / f"subject_{part}.txt", who, fmt="%d")
        np.savetxt(source / part / f"y_{part}.txt", np.arange(len(who)) + 1, fmt="%d")
    found["convert"](source, tmp_path / "activity")
    data = open_windows(tmp_path / "activity")
    assert data.shifts == ("1", "2", "3")
    first = np.load(tmp_path / "activity" / "1" / "inputs.npy")
    np.testing.assert_allclose(first, values["train"][[0, 2]], rtol=1e-6)
    assert data.labels.tolist() == [0, 2, 0, 1]
    assert DATA_SETS["activity"].contents.resembles(tmp_path / "activity") > 0


def test_every_data_set_is_on_the_page() -> None:
    text = PAGE.with_name("datasets.md").read_text()
    assert all(f"`{name}`" in text for name in DATA_SETS)
