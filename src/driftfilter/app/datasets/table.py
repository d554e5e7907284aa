"""The one table of published data sets: where each is, under which licence, how it lies on disk,
what reads it, and what a whole one contains.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, final

from driftfilter.app.datasets.files import Batch, CorruptedArrays, Table, Windows
from driftfilter.app.datasets.findings import Contents
from driftfilter.app.datasets.folders import (
    AnnotatedFolder,
    ClassFolders,
    CorruptedFolders,
    DomainFolders,
)
from driftfilter.base.suggest import nearest, require


class Archive(NamedTuple):
    """A file to download."""

    name: str
    size: str
    md5: str = ""  # as published; "": none is


@final
@dataclass(frozen=True)
class DataSet:
    """A data set. ``options`` are those of ``driftfilter bench`` after --data PATH."""

    title: str
    licence: str
    source: str
    unpack: str
    layout: str
    options: str
    contents: Contents
    archives: tuple[Archive, ...] = ()
    path: str = ""  # what --data takes, as a rule
    aliases: tuple[str, ...] = field(default=())  # names its folder may have

    def describe(self, name: str) -> str:
        """All that is known of it, as text."""
        files = [
            f"{each.name}, {each.size}" + (f", md5 {each.md5}" if each.md5 else "")
            for each in self.archives
        ]
        rows = [
            ("licence", self.licence),
            ("from", self.source),
            *(("file", each) for each in files),
            ("unpack", self.unpack),
            ("layout", self.layout),
            ("check", f"driftfilter data {self.path} --dataset {name}"),
            ("bench", f"driftfilter bench --data {self.path} {self.options}"),
        ]
        return "\n".join([f"{name}: {self.title}", *(f"  {key:<8}{text}" for key, text in rows)])

    def to_dict(self) -> dict[str, object]:
        """All that is known of it, JSON-ready."""
        return {
            "title": self.title,
            "licence": self.licence,
            "from": self.source,
            "archives": [each._asdict() for each in self.archives],
            "unpack": self.unpack,
            "layout": self.layout,
            "bench": f"driftfilter bench --data {self.path} {self.options}",
        }


MODEL = "--models torchvision:resnet50=resnet50.pth"
CORRUPTED = "Hendrycks and Dietterich, 2019"
BY_NAME = "classes count by name (--classes wnids.txt for a network with that file's other order)"
OF_IMAGENET = "the pictures are ImageNet's or from the web: research, no commercial use"

DATA_SETS: Mapping[str, DataSet] = {
    "cifar10": DataSet(
        "the clean test images of CIFAR-10, python version (Krizhevsky, 2009)",
        "none is stated; cite the report",
        "https://www.cs.toronto.edu/~kriz/cifar.html",
        "tar xf cifar-10-python.tar.gz",
        "cifar-10-batches-py/test_batch, of which corruptions are made",
        "",
        Batch("test_batch"),
        (Archive("cifar-10-python.tar.gz", "163 MB", "c58f30108f718f92721af3b95e74349a"),),
        "cifar-10-batches-py",
    ),
    "cifar100": DataSet(
        "the clean test images of CIFAR-100, python version (Krizhevsky, 2009)",
        "none is stated; cite the report",
        "https://www.cs.toronto.edu/~kriz/cifar.html",
        "tar xf cifar-100-python.tar.gz",
        "cifar-100-python/test, of which corruptions are made",
        "--models my_package.models:make",
        Batch("test"),
        (Archive("cifar-100-python.tar.gz", "161 MB", "eb9058c3a382ffc7106e4002c42a8d85"),),
        "cifar-100-python",
    ),
    "cifar10-c": DataSet(
        f"CIFAR-10 under 19 corruptions ({CORRUPTED})",
        "CC BY 4.0",
        "https://zenodo.org/records/2535967",
        "tar xf CIFAR-10-C.tar",
        "<corruption>.npy [50000, 32, 32, 3], 8 bits, severity s in rows 10000 (s - 1) to 10000 s; "
        "labels.npy [50000]",
        "--severity 5",
        CorruptedArrays(10),
        (Archive("CIFAR-10-C.tar", "2.9 GB", "56bf5dcef84df0e2308c6dcbcbbd8499"),),
        "CIFAR-10-C",
    ),
    "cifar100-c": DataSet(
        f"CIFAR-100 under 19 corruptions ({CORRUPTED})",
        "CC BY 4.0",
        "https://zenodo.org/records/3555552",
        "tar xf CIFAR-100-C.tar",
        "as CIFAR-10-C",
        "--models my_package.models:make",
        CorruptedArrays(100),
        (Archive("CIFAR-100-C.tar", "2.9 GB", "11f0ed0f1191edbf9fa23466ae6021d3"),),
        "CIFAR-100-C",
    ),
    "imagenet-c": DataSet(
        f"ImageNet's validation pictures under 19 corruptions, 224 x 224 ({CORRUPTED})",
        f"CC BY 4.0; {OF_IMAGENET}",
        "https://zenodo.org/records/2235448",
        "for file in *.tar; do tar xf $file -C ImageNet-C; done (extra.tar: the four for tuning)",
        "<corruption>/<severity>/<wnid>/*.JPEG, with or without a folder for each archive above",
        f"{MODEL} --batch 64",
        CorruptedFolders(1000, 50),
        (
            Archive("noise.tar", "21 GB", "e80562d7f6c3f8834afb1ecf27252745"),
            Archive("blur.tar", "7 GB", "2d8e81fdd8e07fef67b9334fa635e45c"),
            Archive("weather.tar", "12 GB", "33ffea4db4d93fe4a428c40a6ce0c25d"),
            Archive("digital.tar", "7 GB", "89157860d7b10d5797849337ca2e5c03"),
            Archive("extra.tar", "15 GB", "d492dfba5fc162d8ec2c3cd8ee672984"),
        ),
        "ImageNet-C",
    ),
    "tiny-imagenet": DataSet(
        "200 classes of ImageNet at 64 x 64 pixels (Stanford CS231n)",
        OF_IMAGENET,
        "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
        "unzip tiny-imagenet-200.zip",
        "val/images/*.JPEG with val/val_annotations.txt, of which corruptions are made; "
        f"train/<wnid>/images/*.JPEG; {BY_NAME}",
        "--models resnet18_tiny=resnet18_tiny.safetensors",
        AnnotatedFolder(200, 500, 10_000),
        (Archive("tiny-imagenet-200.zip", "248 MB", "90528d7ca1a48142e341f4ef8d21d0de"),),
        "tiny-imagenet-200/val",
        ("tiny-imagenet-200",),
    ),
    "tiny-imagenet-c": DataSet(
        f"Tiny-ImageNet's validation pictures under 15 corruptions ({CORRUPTED})",
        f"CC BY 4.0; {OF_IMAGENET}",
        "https://zenodo.org/records/2536630",
        "tar xf Tiny-ImageNet-C.tar",
        f"<corruption>/<severity>/<wnid>/*.JPEG; {BY_NAME}",
        "--models resnet18_tiny=resnet18_tiny.safetensors",
        CorruptedFolders(200, 50),
        (Archive("Tiny-ImageNet-C.tar", "1.8 GB", "f9c9a9dbdc11469f0b850190f7ad8be1"),),
        "Tiny-ImageNet-C",
    ),
    "imagenet-r": DataSet(
        "renditions of 200 classes of ImageNet (Hendrycks et al., 2021)",
        f"MIT for the repository; {OF_IMAGENET}",
        "https://github.com/hendrycks/imagenet-r",
        "tar xf imagenet-r.tar",
        "<wnid>/*.jpg",
        f"{MODEL} --classes wnids.txt --subset --protocols clean",
        ClassFolders(200, 30_000),
        (Archive("imagenet-r.tar", "2 GB"),),
        "imagenet-r",
    ),
    "imagenet-a": DataSet(
        "pictures of 200 classes that mislead a ResNet-50 (Hendrycks et al., 2021)",
        f"MIT for the repository; {OF_IMAGENET}",
        "https://github.com/hendrycks/natural-adv-examples",
        "tar xf imagenet-a.tar",
        "<wnid>/*.jpg",
        f"{MODEL} --classes wnids.txt --subset --protocols clean",
        ClassFolders(200, 7_500),
        (Archive("imagenet-a.tar", "0.7 GB"),),
        "imagenet-a",
    ),
    "imagenet-v2": DataSet(
        "ten new pictures of every class, in three selections (Recht et al., 2019)",
        f"MIT for the repository; {OF_IMAGENET}",
        "https://github.com/modestyachts/ImageNetV2",
        "tar xf imagenetv2-matched-frequency.tar.gz",
        "<class number>/*.jpeg: a folder's name is its label",
        f"{MODEL} --protocols clean",
        ClassFolders(1000, 10_000, 10),
        (Archive("imagenetv2-matched-frequency.tar.gz", "1.3 GB"),),
        "imagenetv2-matched-frequency-format-val",
        ("imagenetv2",),
    ),
    "imagenet-sketch": DataSet(
        "black and white sketches of every class (Wang et al., 2019)",
        f"MIT for the repository; {OF_IMAGENET}",
        "https://github.com/HaohanWang/ImageNet-Sketch",
        "unzip ImageNet-Sketch.zip",
        "<wnid>/sketch_*.JPEG",
        f"{MODEL} --protocols clean",
        ClassFolders(1000, 50_889, prefix="sketch_"),
        (Archive("ImageNet-Sketch.zip", "7 GB"),),
        "ImageNet-Sketch/sketch",
        ("sketch",),
    ),
    "pacs": DataSet(
        "7 classes as photographs, paintings, cartoons and sketches (Li et al., 2017)",
        "none is stated: research",
        "https://domaingeneralization.github.io",
        "unzip PACS.zip (pictures 227 x 227)",
        "<domain>/<class>/*.jpg or *.png",
        "--models my_package.models:make,resize=224,crop=224 "
        "--corruptions art_painting,cartoon,sketch",
        DomainFolders({"photo": 1670, "art_painting": 2048, "cartoon": 2344, "sketch": 3929}, 7),
        (),
        "PACS",
    ),
    "office-31": DataSet(
        "31 office things, from a shop's pages and from two cameras (Saenko et al., 2010)",
        "none is stated: research",
        "https://faculty.cc.gatech.edu/~judy/domainadapt/",
        "tar xf domain_adaptation_images.tar.gz",
        "<domain>/images/<class>/*.jpg",
        "--models my_package.models:make --corruptions dslr,webcam",
        DomainFolders({"amazon": 2817, "dslr": 498, "webcam": 795}, 31),
        (),
        "office31",
    ),
    "office-home": DataSet(
        "65 things of office and home in four styles (Venkateswara et al., 2017)",
        "research and education, no commercial use",
        "https://www.hemanthdv.org/officeHomeDataset.html",
        "unzip OfficeHomeDataset_10072016.zip",
        "<domain>/<class>/*.jpg; one domain is called 'Real World'",
        "--models my_package.models:make --corruptions 'Art,Clipart,Product'",
        DomainFolders({"Art": 2427, "Clipart": 4365, "Product": 4439, "Real World": 4357}, 65),
        (Archive("OfficeHomeDataset_10072016.zip", "1.1 GB"),),
        "OfficeHomeDataset_10072016",
        ("officehome",),
    ),
    "domainnet": DataSet(
        "345 classes in six styles, cleaned version (Peng et al., 2019)",
        "research, no commercial use",
        "http://ai.bu.edu/M3SDA/",
        "for file in *.zip; do unzip $file -d DomainNet; done",
        "<domain>/<class>/*; lists <domain>_train.txt and <domain>_test.txt of a path and a label "
        "a line, which --data takes, too",
        "--models my_package.models:make --corruptions clipart,painting,sketch",
        DomainFolders(
            {
                "clipart": 48_129,
                "infograph": 51_605,
                "painting": 72_266,
                "quickdraw": 172_500,
                "real": 172_947,
                "sketch": 69_128,
            },
            345,
        ),
        (),
        "DomainNet",
    ),
    "camelyon17": DataSet(
        "patches of lymph nodes from five hospitals, of WILDS 1.0 (Koh et al., 2021)",
        "CC0 1.0",
        "https://wilds.stanford.edu/datasets/#camelyon17",
        "tar xf archive.tar.gz -C camelyon17_v1.0",
        "metadata.csv, a row for each patch; patches/patient_*_node_*/*.png, 96 x 96",
        "--models my_package.models:make --columns label=tumor,domain=center,where=split:1,"
        "path=patches/patient_{patient}_node_{node}/"
        "patch_patient_{patient}_node_{node}_x_{x_coord}_y_{y_coord}.png",
        Table(
            "metadata.csv",
            ("patient", "node", "x_coord", "y_coord", "tumor", "center", "split"),
            455_954,
            "patches/patient_{patient}_node_{node}/"
            "patch_patient_{patient}_node_{node}_x_{x_coord}_y_{y_coord}.png",
        ),
        (),
        "camelyon17_v1.0/metadata.csv",
        ("camelyon17_v1.0",),
    ),
    "iwildcam": DataSet(
        "animals at 323 camera traps, of WILDS 2.0 (Koh et al., 2021)",
        "Community Data License Agreement, permissive, 1.0",
        "https://wilds.stanford.edu/datasets/#iwildcam",
        "tar xf archive.tar.gz -C iwildcam_v2.0",
        "metadata.csv, a row for each picture; train/*.jpg",
        "--models my_package.models:make --columns label=y,domain=location_remapped,"
        "where=split:test,path=train/{filename}",
        Table(
            "metadata.csv",
            ("split", "location_remapped", "filename", "y"),
            203_029,
            "train/{filename}",
        ),
        (),
        "iwildcam_v2.0/metadata.csv",
        ("iwildcam_v2.0",),
    ),
    "elec2": DataSet(
        "price of electricity in New South Wales, up or down, in half hours (Harries, 1999)",
        "none is stated",
        "https://github.com/scikit-multiflow/streaming-datasets (elec.csv)",
        "nothing to unpack",
        "elec.csv in the order of time, 45,312 rows, 6 columns of numbers and the class",
        "--models my_package.models:make --columns label=class --protocols continual --batch 16",
        Table(
            "elec.csv",
            ("period", "nswprice", "nswdemand", "vicprice", "vicdemand", "transfer", "class"),
            45_312,
        ),
        (),
        "elec.csv",
    ),
    "weather": DataSet(
        "rain or none at Bellevue, Nebraska, by day (NOAA; Ditzler and Polikar, 2013)",
        "public domain (NOAA)",
        "https://github.com/scikit-multiflow/streaming-datasets (weather.csv)",
        "nothing to unpack",
        "weather.csv in the order of time, 18,159 rows, 8 columns of numbers and the class",
        "--models my_package.models:make --columns label=target --protocols continual --batch 16",
        Table("weather.csv", (*(f"feat_{number}" for number in range(1, 9)), "target"), 18_159),
        (),
        "weather.csv",
    ),
    "activity": DataSet(
        "six activities of 30 people by accelerometer and gyroscope (Anguita et al., 2013)",
        "CC BY 4.0",
        "https://archive.ics.uci.edu/dataset/240",
        "unzip, then the script of docs/data.md, which writes a folder for each person",
        "<person>/inputs.npy [n, 9, 128] and <person>/labels.npy [n]",
        "--models my_package.models:make --protocols reset --batch 32",
        Windows(30, 10_299, (9, 128), 6),
        (),
        "activity",
    ),
}

# Data of the user's own: a name, how the files lie, and what reads them.
LAYOUTS: Mapping[str, str] = {
    "arrays": '.npz: 8 bits [n, h, w, 3] for each shift, and "labels" [n]; "images" alone: clean',
    "pictures": "root/<shift>/<class>/*.png, root/<shift>/<severity>/<class>/*.png, or "
    "root/<class>/*.png, of which corruptions are made",
    "list": ".csv, .parquet or .jsonl with columns path and label, perhaps domain; .txt: a path "
    "and a label a line",
    "table": ".csv, .parquet or .jsonl of numbers in the order of time, with a column label",
    "texts": ".jsonl, .csv or .parquet with columns text and label, for a model with a tokenizer; "
    "or .jsonl with an array for each input of the model",
    "windows": "inputs.npy [n, ...] and labels.npy [n], in a folder for each domain or in one; or "
    "an .npz of inputs, labels and domains",
}


def find_data_set(name: str) -> DataSet:
    """The data set of this name."""
    known = list(DATA_SETS)
    require(name in known, "data set", name, f"one of {', '.join(known)}{nearest(name, known)}")
    return DATA_SETS[name]
