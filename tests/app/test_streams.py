"""Data of streams against arrays and folders made by hand."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from driftfilter.app import streams
from driftfilter.app.corruptions import CORRUPTIONS, EXTRA, corrupt
from driftfilter.app.readers.folders import open_folders
from driftfilter.app.readers.published import open_npz, open_published
from driftfilter.app.readers.stored import Stored
from driftfilter.app.streams import (
    CLEAN,
    Generated,
    Images,
    Shift,
    open_cifar10,
    open_domains,
    sample_images,
)

CPU = torch.device("cpu")
COUNT = 20
LABELS = np.arange(COUNT) % 10


def _pixels(seed: int, count: int = COUNT, size: int = 32) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (count, size, size, 3), dtype=np.uint8)


def _images(pixels: NDArray[np.uint8], labels: NDArray[np.int64] = LABELS) -> Images:
    return Images(
        torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy()).float() / 255,
        torch.from_numpy(labels),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A CIFAR-10-C of 20 images at each severity, with one of the extra corruptions."""
    np.save(tmp_path / "labels.npy", np.tile(LABELS, 5).astype(np.uint8))
    for seed, name in enumerate([*CORRUPTIONS, "spatter"]):
        np.save(tmp_path / f"{name}.npy", _pixels(seed, 5 * COUNT))
    return tmp_path


def _take(domains: streams.Domains, shift: Shift, index: torch.Tensor) -> torch.Tensor:
    taken = domains.take(shift, index, CPU)
    assert isinstance(taken, torch.Tensor)
    return taken


def _save_pictures(root: Path, pixels: NDArray[np.uint8], classes: int = 2) -> None:
    """Picture i goes to class i mod ``classes``."""
    for number, pixel in enumerate(pixels):
        place = root / f"class{number % classes}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixel).save(place / f"{number:03d}.png")


class TestGenerated:
    clean = Images(sample_images().images[:40], sample_images().labels[:40])

    @pytest.mark.parametrize(
        "shift", [Shift("fog", 3), Shift("gaussian_noise"), Shift("spatter", 1)], ids=str
    )
    def test_it_is_the_corruption_of_all_images_in_8_bits(self, shift: Shift) -> None:
        index = torch.tensor([7, 3, 39, 3])
        taken = Generated(self.clean, seed=5).take(shift, index, CPU)
        expected = corrupt(self.clean.images, shift.corruption, shift.severity, seed=5)[index]
        assert taken.dtype == torch.uint8
        assert torch.equal(taken / 255, expected)

    def test_clean_is_the_original(self) -> None:
        taken = Generated(self.clean).take(CLEAN, torch.tensor([2, 0]), CPU)
        assert torch.equal(taken / 255, self.clean.images[[2, 0]])

    def test_each_shift_is_made_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = []

        def counted(images: torch.Tensor, *rest: object) -> torch.Tensor:
            calls.append(rest)
            return images

        monkeypatch.setattr(streams, "corrupt", counted)
        domains = Generated(self.clean, seed=2)
        for shift in (Shift("fog", 1), Shift("fog", 2), Shift("fog", 1), Shift("fog", 2)):
            domains.take(shift, torch.arange(4), CPU)
        assert calls == [("fog", 1, 2), ("fog", 2, 2)]

    def test_what_is_taken_is_a_copy(self) -> None:
        domains = Generated(self.clean)
        domains.take(CLEAN, torch.arange(3), CPU).zero_()
        assert torch.equal(domains.take(CLEAN, torch.arange(3), CPU) / 255, self.clean.images[:3])

    def test_description(self) -> None:
        domains = Generated(self.clean)
        other = Generated(self.clean._replace(labels=self.clean.labels.flip(0)))
        assert domains.shifts == ("clean", *CORRUPTIONS, *EXTRA)
        assert torch.equal(domains.labels, self.clean.labels)
        found = domains.describe()
        assert (found["kind"], found["frost"]) == ("generated", "procedural")
        assert found["sha256"] != other.describe()["sha256"]
        assert found == Generated(self.clean).describe()

    @pytest.mark.parametrize(
        ("shift", "message"),
        [
            (Shift("fogg"), "shift must be one of .* \\(did you mean 'fog'\\?\\), got 'fogg'"),
            (Shift("fog", 0), "severity must be one of 1, 2, 3, 4, 5 for 'fog', got 0"),
            (Shift("fog", 6), "severity must be one of 1, 2, 3, 4, 5 for 'fog', got 6"),
            (Shift("clean"), "severity must be one of 0 for 'clean', got 5"),
        ],
        ids=str,
    )
    def test_refused_shifts(self, shift: Shift, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            Generated(self.clean).take(shift, torch.arange(2), CPU)

    @pytest.mark.parametrize("index", [[-1], [40], [[1]], [1.0]], ids=str)
    def test_refused_samples(self, index: list[int]) -> None:
        with pytest.raises(ValueError, match="index must be"):
            Generated(self.clean).take(CLEAN, torch.tensor(index), CPU)

    @pytest.mark.parametrize(
        ("images", "labels", "message"),
        [
            (255 * clean.images, clean.labels, "clean.images must be in \\[0, 1\\]"),
            (clean.images[..., :16], clean.labels, "at least 32 pixels"),
            (clean.images.permute(0, 2, 3, 1), clean.labels, "channels before pixels"),
            (clean.images, clean.labels[:3], "clean.labels must be 40 integer labels"),
            (clean.images, clean.labels - 1, "clean.labels must be 40 integer labels .* from -1"),
        ],
        ids=["range", "size", "layout", "length", "labels"],
    )
    def test_refused_images(self, images: torch.Tensor, labels: torch.Tensor, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            Generated(Images(images, labels))


class TestPublished:
    def test_severities_are_blocks_of_rows(self, folder: Path) -> None:
        domains, index = open_published(folder), torch.tensor([19, 0, 4, 4])
        assert domains.shifts == (*CORRUPTIONS, "spatter")
        assert domains.labels.tolist() == LABELS.tolist()
        for seed, name in enumerate(domains.shifts):
            for severity in range(1, 6):
                expected = _pixels(seed, 5 * COUNT)[COUNT * (severity - 1) :][
                    index.numpy()
                ].transpose(0, 3, 1, 2)
                taken = _take(domains, Shift(name, severity), index)
                assert taken.dtype == torch.uint8
                assert np.array_equal(taken.numpy(), expected)

    def test_clean_only_where_given(self, folder: Path) -> None:
        with pytest.raises(ValueError, match="shift must be one of"):
            open_published(folder).take(CLEAN, torch.arange(2), CPU)
        pixels = _pixels(99)
        taken = _take(open_published(folder, _images(pixels)), CLEAN, torch.tensor([3, 1]))
        assert np.array_equal(taken.numpy(), pixels[[3, 1]].transpose(0, 3, 1, 2))

    def test_clean_images_of_another_order(self, folder: Path) -> None:
        with pytest.raises(
            ValueError, match=r"clean\.labels must be the 20 labels of the shifted images"
        ):
            open_published(folder, _images(_pixels(0), LABELS[::-1].copy()))

    def test_some_corruptions_suffice_where_asked(self, folder: Path) -> None:
        (folder / "fog.npy").unlink()
        (folder / "spatter.npy").write_bytes(b"")
        assert open_published(folder, names=("snow",)).shifts == ("snow",)
        assert open_published(folder, _images(_pixels(0)), ("clean", "snow")).shifts == (
            "snow",
            "clean",
        )
        with pytest.raises(
            ValueError, match=r"shift must be one of .* \(did you mean 'snow'\?\), got 'snw'"
        ):
            open_published(folder, names=("snw",))
        assert open_published(folder, names=("snow",)).with_seed(3).shifts == ("snow",)

    def test_description_follows_the_files(self, folder: Path) -> None:
        before = open_published(folder).describe()
        assert (before["kind"], before["path"]) == ("CIFAR-10-C", str(folder))
        assert open_published(folder).describe() == before
        np.save(folder / "fog.npy", _pixels(50, 5 * COUNT))
        assert open_published(folder).describe()["sha256"] != before["sha256"]

    @pytest.mark.parametrize(
        ("shift", "message"),
        [
            (Shift("frozt"), "did you mean 'frost'"),
            (Shift("fog", 6), "severity must be one of 1, 2, 3, 4, 5 for 'fog' in .*, got 6"),
            (Shift("fog", 0), "severity must be one of 1, 2, 3, 4, 5 for 'fog' in .*, got 0"),
        ],
        ids=str,
    )
    def test_refused_shifts(self, folder: Path, shift: Shift, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            open_published(folder).require(shift)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


FOG = _pixels(0, 5 * COUNT)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("fog", Path.unlink, "must be an .npy file, got 'no such file'"),
        (
            "fog",
            _truncate,
            "must be 307328 bytes long for uint8 \\[100, 32, 32, 3\\] \\(truncated copy\\?\\), "
            "got '306328 bytes'",
        ),
        (
            "fog",
            lambda path: path.write_bytes(path.read_bytes() + b"more"),
            "must be 307328 bytes long .* got '307332 bytes'",
        ),
        ("fog", lambda path: path.write_bytes(b"\x93NUMPY"), "must be an .npy file, got"),
        ("fog", lambda path: path.write_bytes(b""), "must be an .npy file, got"),
        ("fog", lambda path: np.save(path, np.array([{}])), "must be an array of numbers"),
        (
            "fog",
            lambda path: np.save(path, np.float32(FOG / 255)),
            "must be uint8 images .* got 'float32 .* from 0 to 1",
        ),
        (
            "fog",
            lambda path: np.save(path, FOG // 200),
            "must be uint8 images 0 … 255, .* not 0 … 1",
        ),
        (
            "fog",
            lambda path: np.save(path, FOG.transpose(0, 3, 1, 2)),
            "channels last .*\\[100, 3, 32, 32\\] \\(channels first",
        ),
        ("fog", lambda path: np.save(path, FOG[..., 0]), "must be uint8 images"),
        (
            "fog",
            lambda path: np.save(path, FOG[:80]),
            "must be 100 images, one for each label, got '80 images'",
        ),
        (
            "fog",
            lambda path: np.save(path, FOG[:, :16]),
            "must be \\[100, 32, 32, 3\\], as .*gaussian_noise.npy is, got",
        ),
        ("spatter", _truncate, "truncated copy"),
        ("labels", Path.unlink, "must be an .npy file, got 'no such file'"),
        ("labels", _truncate, "must be an .npy file, got"),
        (
            "labels",
            lambda path: np.save(path, np.zeros(80, int)),
            "must be 80 images, one for each label, got '100 images'",
        ),
        (
            "labels",
            lambda path: np.save(path, np.arange(99) % 10),
            "must be 5 N labels long, .* got '99 labels'",
        ),
        (
            "labels",
            lambda path: np.save(path, np.arange(100) % 7),
            "must be the same N labels for each of 5 severities",
        ),
        (
            "labels",
            lambda path: np.save(path, np.tile(LABELS + 91, 5)),
            "from 0 to 100 - 1, got 'labels from 91 to 100'",
        ),
        (
            "labels",
            lambda path: np.save(path, np.tile(LABELS - 1, 5)),
            "from 0 to 100 - 1, got 'labels from -1 to 8'",
        ),
        (
            "labels",
            lambda path: np.save(path, np.tile(LABELS / 1.0, 5)),
            "integer labels from 0 to 100 - 1, got dtype",
        ),
        (
            "labels",
            lambda path: np.save(path, np.eye(10, dtype=int)),
            "integer labels from 0 to 100 - 1, got \\[10, 10\\]",
        ),
    ],
    ids=[
        *(
            "missing",
            "truncated",
            "longer",
            "header",
            "empty",
            "objects",
            "floats",
            "ones",
            "layout",
            "grey",
            "short",
            "size",
            "extra",
        ),
        *(
            "no-labels",
            "truncated-labels",
            "other-length",
            "not-five",
            "not-repeated",
            "too-high",
            "negative",
            "float",
            "one-hot",
        ),
    ],
)
def test_damaged_folders_name_the_file(
    folder: Path, name: str, damage: Callable[[Path], object], message: str
) -> None:
    damage(folder / f"{name}.npy")
    with pytest.raises(ValueError, match=message) as caught:
        open_domains(folder)
    assert str(folder) in str(caught.value)
    assert name in str(caught.value) or "one for each label" in message


class TestArrays:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        np.savez(
            tmp_path / "own.npz", fog=_pixels(1), dusk=_pixels(2), clean=_pixels(3), labels=LABELS
        )
        return tmp_path / "own.npz"

    def test_arrays_are_shifts(self, file: Path) -> None:
        domains = open_npz(file, severity=3)
        assert domains.shifts == ("fog", "dusk", "clean")
        assert domains.labels.tolist() == LABELS.tolist()
        for seed, shift in ((1, Shift("fog", 3)), (2, Shift("dusk", 3)), (3, CLEAN)):
            assert np.array_equal(
                _take(domains, shift, torch.tensor([5, 2])).numpy(),
                _pixels(seed)[[5, 2]].transpose(0, 3, 1, 2),
            )
        with pytest.raises(ValueError, match="severity must be one of 3 for 'fog'"):
            domains.require(Shift("fog", 5))

    def test_labels_and_clean_of_the_first_clean_images(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "own.npz", fog=_pixels(1, 8))
        pixels = _pixels(7)
        domains = open_domains(tmp_path / "own.npz", _images(pixels))
        assert domains.labels.tolist() == LABELS[:8].tolist()
        assert np.array_equal(
            _take(domains, CLEAN, torch.tensor([7, 0])).numpy(),
            pixels[[7, 0]].transpose(0, 3, 1, 2),
        )

    @pytest.mark.parametrize(
        ("contents", "message"),
        [
            ({"fog": _pixels(1)}, "own.npz must be given with labels"),
            (
                {"labels": LABELS},
                "own.npz must be an .npz with an array of images for each corruption",
            ),
            (
                {"fog": _pixels(1), "labels": LABELS[:5]},
                "own.npz: labels must be 20 integer labels .* got \\[5\\]",
            ),
            (
                {"fog": _pixels(1), "labels": LABELS - 3},
                "own.npz: labels must be .* got 'labels from -3 to 6'",
            ),
            (
                {"fog": _pixels(1) / 255, "labels": LABELS},
                "own.npz: fog must be uint8 images .* got 'float64",
            ),
            (
                {"fog": _pixels(1).transpose(0, 3, 1, 2), "labels": LABELS},
                "own.npz: fog must be .*\\(channels first",
            ),
            (
                {"fog": _pixels(1), "dusk": _pixels(2, 19), "labels": LABELS},
                "own.npz: dusk must be \\[20, 32, 32, 3\\], as .*fog",
            ),
            ({"images": _pixels(0)}, "own.npz must be an .npz with 'labels'"),
            (
                {"images": _pixels(0), "fog": _pixels(1), "labels": LABELS},
                "own.npz must be .* of clean 'images' alone, .* got \\['images', 'fog'\\]",
            ),
        ],
        ids=[
            *("no-labels", "no-images", "length", "negative", "floats", "layout", "other-count"),
            *("clean-without-labels", "clean-among-corruptions"),
        ],
    )
    def test_refused(
        self, tmp_path: Path, contents: dict[str, NDArray[np.int64]], message: str
    ) -> None:
        np.savez(tmp_path / "own.npz", **contents)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=message):
            open_domains(tmp_path / "own.npz")

    @pytest.mark.parametrize(
        "damage",
        [
            lambda content: content[: len(content) // 2],
            lambda content: content[:1000] + bytes(100) + content[1100:],
            lambda content: b"text",
        ],
        ids=["truncated", "inside", "another-kind"],
    )
    def test_damaged(self, file: Path, damage: Callable[[bytes], bytes]) -> None:
        file.write_bytes(damage(file.read_bytes()))
        with pytest.raises(ValueError, match=r"own\.npz must be a whole \.npz file"):
            open_domains(file)


class TestFolders:
    def _check(self, domains: Stored, shift: Shift, pixels: NDArray[np.uint8]) -> None:
        """Picture i is of class i mod 2; which sample it is, is told by its pixels."""
        taken = _take(domains, shift, torch.arange(len(pixels))).permute(0, 2, 3, 1).numpy()
        numbers = [
            next(i for i, pixel in enumerate(pixels) if np.array_equal(pixel, row)) for row in taken
        ]
        assert sorted(numbers) == list(range(len(pixels)))
        assert domains.labels.tolist() == [number % 2 for number in numbers]
        some = torch.tensor([4, 1])
        assert np.array_equal(
            _take(domains, shift, some).permute(0, 2, 3, 1).numpy(), taken[some.numpy()]
        )

    def test_shift_and_class(self, tmp_path: Path) -> None:
        for seed, name in enumerate(("dusk", "rain", "clean")):
            _save_pictures(tmp_path / name, _pixels(seed, 10, 40))
        domains = open_folders(tmp_path)
        assert set(domains.shifts) == {"dusk", "rain", "clean"}
        for seed, shift in enumerate((Shift("dusk"), Shift("rain"), CLEAN)):
            self._check(domains, shift, _pixels(seed, 10, 40))

    def test_shift_severity_and_class(self, tmp_path: Path) -> None:
        for severity in (1, 5):
            _save_pictures(tmp_path / "fog" / str(severity), _pixels(severity, 10))
        domains = open_folders(tmp_path)
        for severity in (1, 5):
            self._check(domains, Shift("fog", severity), _pixels(severity, 10))
        with pytest.raises(ValueError, match="severity must be one of 1, 5 for 'fog'"):
            domains.require(Shift("fog", 3))

    def test_class_alone_is_clean(self, tmp_path: Path) -> None:
        _save_pictures(tmp_path, _pixels(0, 10))
        domains = open_folders(tmp_path)
        assert domains.shifts == ("clean",)
        self._check(domains, CLEAN, _pixels(0, 10))

    def test_samples_of_all_classes_come_early(self, tmp_path: Path) -> None:
        _save_pictures(tmp_path, _pixels(0, 40))
        assert set(open_folders(tmp_path).labels[:10].tolist()) == {0, 1}

    def test_grey_and_transparent_pictures_become_rgb(self, tmp_path: Path) -> None:
        (tmp_path / "one").mkdir()
        grey = _pixels(0, 1)[0, :, :, 0]
        Image.fromarray(grey).save(tmp_path / "one" / "grey.png")
        taken = _take(open_folders(tmp_path), CLEAN, torch.tensor([0]))
        assert np.array_equal(taken[0].numpy(), np.stack([grey] * 3))

    def test_description_follows_names_and_sizes(self, tmp_path: Path) -> None:
        _save_pictures(tmp_path, _pixels(0, 4))
        before = open_folders(tmp_path).describe()
        assert open_folders(tmp_path).describe() == before
        (tmp_path / "class0" / "000.png").rename(tmp_path / "class0" / "other.png")
        assert open_folders(tmp_path).describe()["sha256"] != before["sha256"]

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (
                lambda root: (root / "fog" / "class1" / "001.png").write_bytes(b"none"),
                "001.png must be a picture that can be read",
            ),
            (
                lambda root: Image.new("RGB", (9, 7)).save(root / "fog" / "class1" / "001.png"),
                "001.png must be 32x32 .*got '7x9'",
            ),
            (
                lambda root: (root / "snow" / "class2").mkdir(),
                "class2 must be a class folder of pictures",
            ),
            (
                lambda root: (root / "snow" / "class1" / "001.png").unlink(),
                "snow.* must be the same pictures by name .* got .'class1/001'",
            ),
            (
                lambda root: (root / "snow" / "class1").rename(root / "snow" / "other"),
                "snow.* must be the same pictures by name .* got .'class1/001'",
            ),
            (lambda root: (root / "frost").mkdir(), "frost must be a folder of class folders"),
        ],
        ids=["corrupt", "size", "empty-class", "missing", "classes", "empty-shift"],
    )
    def test_refused(self, tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
        for name in ("fog", "snow"):
            _save_pictures(tmp_path / name, _pixels(0, 4))
        damage(tmp_path)
        with pytest.raises(ValueError, match=message):
            open_domains(tmp_path)

    def test_a_severity_that_is_none(self, tmp_path: Path) -> None:
        _save_pictures(tmp_path / "fog" / "6", _pixels(0, 4))
        with pytest.raises(
            ValueError, match="6 must be named after a severity, one of 1, 2, 3, 4, 5, got '6'"
        ):
            open_folders(tmp_path)

    def test_without_pillow(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        _save_pictures(tmp_path, _pixels(0, 4))
        monkeypatch.setitem(sys.modules, "PIL", None)
        with pytest.raises(ImportError, match="folders of pictures need pillow"):
            open_folders(tmp_path)

    def test_a_picture_cut_short_is_named_when_read(self, tmp_path: Path) -> None:
        _save_pictures(tmp_path, _pixels(0, 4))
        _truncate(tmp_path / "class0" / "002.png")
        domains = open_folders(tmp_path)
        with pytest.raises(ValueError, match=r"002\.png must be a whole picture"):
            _take(domains, CLEAN, torch.arange(4))


class TestOpening:
    def test_nothing_given(self) -> None:
        domains = open_domains(None)
        assert isinstance(domains, Generated)
        assert len(domains.labels) == 2000
        few = Images(*(part[:5] for part in sample_images()))
        assert len(open_domains(None, few, seed=3).labels) == 5

    def test_cifar10_arrays(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "cifar.npz", images=_pixels(0), labels=LABELS.astype(np.uint8))
        images, labels = open_cifar10(tmp_path / "cifar.npz")
        assert np.array_equal((255 * images).round().numpy(), _pixels(0).transpose(0, 3, 1, 2))
        assert labels.dtype == torch.int64
        assert isinstance(open_domains(str(tmp_path / "cifar.npz"), seed=1), Generated)

    @pytest.mark.parametrize("severity", [0, 6, 2.0], ids=str)
    def test_severities_that_are_none(self, tmp_path: Path, severity: int) -> None:
        np.savez(tmp_path / "own.npz", fog=_pixels(0), labels=LABELS)
        _save_pictures(tmp_path / "pictures" / "fog", _pixels(0, 4))
        for path in (tmp_path / "own.npz", tmp_path / "pictures"):
            with pytest.raises(
                ValueError, match=f"severity must be an integer from 1 to 5, got {severity}"
            ):
                open_domains(path, layout=streams.Layout(severity))

    @pytest.mark.parametrize("name", ["nowhere", "empty"])
    def test_nothing_there(self, tmp_path: Path, name: str) -> None:
        (tmp_path / "empty").mkdir()
        with pytest.raises(ValueError, match=f"{name}.* must be|must be .*{name}"):
            open_domains(tmp_path / name)
