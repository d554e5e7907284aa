"""Folders of pictures in the shapes in which they are published."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from driftfilter.app.corruptions import CORRUPTIONS
from driftfilter.app.readers.corrupted import Corrupted
from driftfilter.app.readers.fit import Fit
from driftfilter.app.readers.folders import open_folders
from driftfilter.app.readers.stored import CLEAN, Shift, Stored
from driftfilter.app.streams import Layout, open_domains
from small_data import (
    WNIDS,
    pixels,
    save_classes,
    save_corruptions,
    save_picture,
    save_tiny_val,
)

CPU = torch.device("cpu")


def take(data: Stored | Corrupted, shift: Shift, index: Tensor | None = None) -> Tensor:
    every = torch.arange(len(data.labels)) if index is None else index
    found = data.take(shift, every, CPU)
    assert isinstance(found, Tensor)
    return found


def find_seeds(found: Tensor, seeds: list[int], size: int = 32) -> list[int]:
    """Which of the pictures made by ``seeds`` each is."""
    known = {pixels(seed, size).tobytes(): seed for seed in seeds}
    return [known[row.permute(1, 2, 0).numpy().tobytes()] for row in found]


@pytest.mark.parametrize("group", ["", "noise"])
def test_imagenet_c(tmp_path: Path, group: str) -> None:
    """With and without a folder for each archive; the same sample under every shift."""
    save_corruptions(tmp_path / group, ("gaussian_noise", "shot_noise"), (1, 5))
    data = open_folders(tmp_path)
    assert data.shifts == ("gaussian_noise", "shot_noise")
    for number, name in enumerate(data.shifts):
        for severity in (1, 5):
            base = 100 * (10 * number + severity)
            seeds = [base + 10 * c + i for c in range(3) for i in range(2)]
            found = find_seeds(take(data, Shift(name, severity)), seeds)
            assert sorted(found) == seeds
            assert data.labels.tolist() == [(seed - base) // 10 for seed in found]


def test_only_what_is_asked_for_is_looked_into(tmp_path: Path) -> None:
    """Others may be missing, damaged or of other pictures."""
    save_corruptions(tmp_path, ("fog", "snow"), (3, 5))
    save_picture(tmp_path / "fog" / "3" / WNIDS[0] / "more.JPEG", 1)
    (tmp_path / "snow" / "5" / WNIDS[1] / "0.JPEG").write_bytes(b"none")
    data = open_folders(tmp_path, names=("fog",), severities=(5,))
    assert list(data.rows) == [Shift("fog", 5)]
    for names, severities, message in (
        (("frost",), (5,), r"shift must be one of fog, snow in .*, got 'frost'"),
        (("clean",), (5,), r"shift must be one of fog, snow in .*, got 'clean'"),
        (("fog",), (4,), r"severity must be one of 3, 5 for 'fog' in .*, got 4"),
        (None, (4, 5), r"severity must be one of 3, 5 for 'fog' in .*, got 4"),
        (None, (3,), r"the same pictures by name .* got \['n01443537/more'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            open_folders(tmp_path, names=names, severities=severities)


def test_classes_are_those_of_all_domains(tmp_path: Path) -> None:
    """Whatever domains are asked for, a class has the same label."""
    save_classes(tmp_path / "photo", 1, ("dog", "horse", "person"))
    save_classes(tmp_path / "sketch", 2, ("horse", "person"))
    every, one = open_folders(tmp_path), open_folders(tmp_path, names=("sketch",))
    assert every.counted == one.counted == ("dog", "horse", "person")
    assert sorted(one.labels.tolist()) == [1, 1, 2, 2]


def test_domains_have_samples_of_their_own(tmp_path: Path) -> None:
    """PACS: as many pictures in each as there are."""
    save_classes(tmp_path / "photo", 1, ("dog", "horse"), count=3, name="{}.jpg")
    save_classes(tmp_path / "sketch", 2, ("dog", "horse"), count=2, name="s{}.png")
    (tmp_path / "__MACOSX").mkdir()  # as archives made elsewhere leave it
    data = open_folders(tmp_path)
    assert data.kind == "domains"
    assert data.members is not None
    assert {name: len(index) for name, index in data.members.items()} == {"photo": 6, "sketch": 4}
    for seed, (name, index) in enumerate(data.members.items(), 1):
        seeds = [100 * seed + 10 * c + i for c in range(2) for i in range(3 if seed == 1 else 2)]
        found = find_seeds(take(data, Shift(name), index), seeds)
        assert sorted(found) == seeds
        assert data.labels[index].tolist() == [seed % 100 // 10 for seed in found]


def test_severities_of_a_domain_are_of_the_same_pictures(tmp_path: Path) -> None:
    save_classes(tmp_path / "dusk" / "1", 1)
    save_classes(tmp_path / "dusk" / "2", 1, count=3)
    with pytest.raises(ValueError, match="the same pictures by name"):
        open_folders(tmp_path)


def test_office_31_has_a_folder_images_in_between(tmp_path: Path) -> None:
    save_classes(tmp_path / "amazon" / "images", 1, ("back_pack", "bike"), name="frame_{}.jpg")
    save_classes(tmp_path / "dslr" / "images", 2, ("back_pack", "bike"), count=1)
    data = open_folders(tmp_path)
    assert data.shifts == ("amazon", "dslr")
    assert data.counted == ("back_pack", "bike")
    assert len(data.labels) == 6


def test_tiny_imagenet(tmp_path: Path) -> None:
    """Validation pictures with a file of their classes, of which corruptions are made; training
    pictures with a folder images below each class.
    """
    save_tiny_val(tmp_path / "val")
    data = open_domains(tmp_path / "val")
    assert isinstance(data, Corrupted)
    found = find_seeds(take(data.clean, CLEAN), list(range(6)), 64)
    assert data.labels.tolist() == [seed % 3 for seed in found]
    for number, name in enumerate(WNIDS):
        save_picture(tmp_path / "train" / name / "images" / f"{name}_0.JPEG", number, 64)
        (tmp_path / "train" / name / f"{name}_boxes.txt").write_text("0\n")
    train = open_folders(tmp_path / "train")
    assert train.shifts == ("clean",)
    assert find_seeds(take(train, CLEAN), [0, 1, 2], 64) == train.labels.tolist()
    (tmp_path / "val" / "images" / "val_4.JPEG").unlink()
    with pytest.raises(ValueError, match=r"val_annotations\.txt .*no picture for .*val_4\.JPEG"):
        open_domains(tmp_path / "val")


def test_a_folder_that_is_a_number_has_that_label(tmp_path: Path) -> None:
    """ImageNet-V2: 10 comes after 9."""
    save_classes(tmp_path, 0, [str(number) for number in range(11)], count=1, name="{}.jpeg")
    data = open_folders(tmp_path)
    assert data.counted is None
    seeds = find_seeds(take(data, CLEAN), [10 * number for number in range(11)])
    assert [seed // 10 for seed in seeds] == data.labels.tolist()


def test_labels_are_those_of_a_mapping(tmp_path: Path) -> None:
    """ImageNet-R: some of a model's classes, in the model's order."""
    save_classes(tmp_path, 0, count=1)
    numbers = {"n9": 0, WNIDS[2]: 1, WNIDS[0]: 4, WNIDS[1]: 7}
    data = open_folders(tmp_path, numbers=numbers)
    assert data.counted is None
    seeds = find_seeds(take(data, CLEAN), [0, 10, 20])
    assert data.labels.tolist() == [{0: 4, 10: 7, 20: 1}[seed] for seed in seeds]
    del numbers[WNIDS[1]]
    message = "class of .* must be one of the 3 of --classes.*, got 'n01629819'"
    with pytest.raises(ValueError, match=message):
        open_folders(tmp_path, numbers=numbers)


def test_reports_tell_mappings_apart(tmp_path: Path) -> None:
    save_classes(tmp_path, 0)
    first, second = (
        open_folders(tmp_path, numbers=dict(zip(names, range(3), strict=True))).describe()
        for names in (WNIDS, WNIDS[::-1])
    )
    assert first["sha256"] == second["sha256"]
    assert first["labels_sha256"] != second["labels_sha256"]


def test_pictures_of_unlike_sizes_need_a_model_that_fits_them(tmp_path: Path) -> None:
    save_classes(tmp_path, 0)
    save_picture(tmp_path / WNIDS[1] / "1.JPEG", 3, (20, 40))
    with pytest.raises(ValueError, match=r"1\.JPEG must be 32x32 pixels.* got '20x40'"):
        open_folders(tmp_path)
    assert len(open_domains(tmp_path, layout=Layout(fitted=True)).labels) == 6


def test_corruptions_are_made_block_by_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever batch asks for a sample, it is the same, and what is made twice is remembered."""
    monkeypatch.setattr("driftfilter.app.readers.corrupted.BLOCK", 4)
    save_classes(tmp_path, 0)
    whole = Corrupted(open_folders(tmp_path), seed=1)
    assert set(whole.shifts) > set(CORRUPTIONS)
    shift = Shift("gaussian_noise", 3)
    together = take(whole, shift)
    again = Corrupted(open_folders(tmp_path), seed=1)
    apart = [take(again, shift, torch.tensor([number])) for number in (5, 0, 3, 1, 4, 2)]
    assert torch.equal(together[[5, 0, 3, 1, 4, 2]], torch.cat(apart))
    assert not torch.equal(together, take(whole.with_seed(2), shift))
    assert len(again._made) == 2
    monkeypatch.setattr("driftfilter.app.readers.corrupted.KEPT", 0)
    take(again, shift, torch.tensor([0]))
    take(again, Shift("contrast"), torch.tensor([0]))
    assert list(again._made) == [(Shift("contrast"), 0, CPU)]
    assert torch.equal(take(again, shift, torch.tensor([5])), apart[0])


def test_blocks_have_other_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a CPU, whose generator takes the last 32 bits of a seed alone."""
    monkeypatch.setattr("driftfilter.app.readers.corrupted.BLOCK", 2)
    for number in range(6):
        save_picture(tmp_path / WNIDS[0] / f"{number}.JPEG", 100)  # six times the same
    first, second, third = take(
        Corrupted(open_folders(tmp_path)), Shift("gaussian_noise", 3)
    ).split(2)
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)


def test_shuffled_once_and_always_alike(tmp_path: Path) -> None:
    save_classes(tmp_path, 0, count=5)
    first, second = (take(open_folders(tmp_path), CLEAN) for _ in range(2))
    assert torch.equal(first, second)
    assert not np.array_equal(open_folders(tmp_path).labels, np.repeat([0, 1, 2], 5))


def test_corruptions_are_kept_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process reads what one has made; other pictures, seeds and sizes have their own."""
    monkeypatch.setattr("driftfilter.app.readers.corrupted.BLOCK", 4)
    pictures, keep = tmp_path / "pictures", tmp_path / "kept"
    save_classes(pictures, 0)
    shift = Shift("defocus_blur", 2)

    def corrupted(seed: int = 0) -> Corrupted:
        made = open_domains(pictures, seed=seed, keep=keep)
        assert isinstance(made, Corrupted)
        return made

    made = take(corrupted(), shift)
    assert torch.equal(made, take(Corrupted(open_folders(pictures)), shift))
    files = sorted(keep.rglob("*"))
    assert [each.name for each in files[1:]] == ["defocus_blur-2-0.npy", "defocus_blur-2-1.npy"]
    with monkeypatch.context() as patch:
        patch.setattr(Corrupted, "_make", None)
        assert torch.equal(made, take(corrupted(), shift))
        assert torch.equal(made, take(corrupted().prepared(None), shift))
    names = {corrupted()._name(CPU), corrupted(1)._name(CPU)}
    names.add(corrupted().prepared(Fit(36, 32))._name(CPU))
    save_picture(pictures / WNIDS[0] / "0.JPEG", 3, 40)
    others = open_domains(pictures, layout=Layout(fitted=True), keep=keep)
    assert isinstance(others, Corrupted)
    names.add(others._name(CPU))
    assert len(names) == 4
    files[1].write_bytes(files[1].read_bytes()[:-1])
    save_classes(pictures, 0)
    with pytest.raises(ValueError, match=r"defocus_blur-2-0\.npy must be .*truncated copy"):
        take(corrupted(), shift)


def test_only_what_is_made_of_pictures_is_kept(tmp_path: Path) -> None:
    save_classes(tmp_path / "fog", 0)
    save_classes(tmp_path / "snow", 0)
    for path in (None, tmp_path):
        with pytest.raises(ValueError, match="keep must be left out: it is for corruptions made"):
            open_domains(path, keep=tmp_path / "kept")
