"""The scripts as fixtures, and small made-up MNIST, CIFAR-10 and CIFAR-100 for all tests.

The files have torchvision's own formats, so that the scripts' real `load_data` reads them: 500
training and 100 test images each, a pattern for each class plus noise. Importing this module puts
their checksums in place of the real ones, and forbids every download.
"""

import hashlib
import importlib
import os
import pickle
import struct
from urllib.error import URLError

import numpy as np
import pytest

# Some virtual machines announce AMX but do not run it: bfloat16 would crash. Torch reads this once.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# Networks here are tiny: more threads gain nothing, and crawl where other programs run too.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from torchvision import datasets  # noqa: E402


def made_up_images(number, classes, channels, size, seed):
    """Pixels (number, channels, size, size) and labels. A class has coarse blocks of its own, the
    same when mirrored; every set of the same classes has the same ones."""
    blocks = np.random.default_rng(classes).integers(40, 216, (classes, channels, 4, 4))
    blocks = (blocks + blocks[..., ::-1]) // 2
    patterns = blocks.repeat(size // 4, axis=2).repeat(size // 4, axis=3)
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(number) % classes)
    noise = rng.integers(-40, 41, (number, channels, size, size))
    return (patterns[labels] + noise).astype(np.uint8), labels


def mnist_files():
    files = {}
    for name, number, seed in (("train", 500, 1), ("t10k", 100, 2)):
        pixels, labels = made_up_images(number, 10, 1, 28, seed)
        images = struct.pack(">4I", 0x803, number, 28, 28) + pixels.tobytes()
        files[f"MNIST/raw/{name}-images-idx3-ubyte"] = images
        digits = struct.pack(">2I", 0x801, number) + labels.astype(np.uint8).tobytes()
        files[f"MNIST/raw/{name}-labels-idx1-ubyte"] = digits
    return files


def cifar_files(cifar, classes, key):
    """The files of CIFAR-10 or CIFAR-100, whose checksums replace those in torchvision's class."""
    contents = {cifar.meta["filename"]: {cifar.meta["key"]: [f"class {k}" for k in range(classes)]}}
    names = [name for name, _ in cifar.train_list]
    number = 500 // len(names)
    pixels, labels = made_up_images(500, classes, 3, 32, seed=3)
    for i, name in enumerate(names):
        part = slice(i * number, (i + 1) * number)
        data = pixels[part].reshape(number, 3072)
        contents[name] = {"data": data, key: labels[part].tolist()}
    pixels, labels = made_up_images(100, classes, 3, 32, seed=4)
    name = cifar.test_list[0][0]
    contents[name] = {"data": pixels.reshape(100, 3072), key: labels.tolist()}

    files = {}
    checksums = {}
    for name, content in contents.items():
        files[f"{cifar.base_folder}/{name}"] = pickle.dumps(content)
        checksums[name] = hashlib.md5(pickle.dumps(content)).hexdigest()
    cifar.train_list = [[name, checksums[name]] for name in names]
    cifar.test_list = [[name, checksums[name]] for name, _ in cifar.test_list]
    cifar.meta = dict(cifar.meta, md5=checksums[cifar.meta["filename"]])
    return files


def no_download(*_, **__):
    raise URLError("tests do not download")


datasets.mnist.download_and_extract_archive = no_download
datasets.cifar.download_and_extract_archive = no_download
FILES = {
    **mnist_files(),  # torchvision checks that these exist
    **cifar_files(datasets.CIFAR10, 10, "labels"),
    **cifar_files(datasets.CIFAR100, 100, "fine_labels"),
}


def write_data(folder):
    """Puts the made-up files there: the folder for `--data`."""
    for name, content in FILES.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    return folder


@pytest.fixture(scope="session")
def toy():
    return importlib.import_module("01_toy_gaussian_mixture")


@pytest.fixture(scope="session")
def mnist():
    return importlib.import_module("02_mnist_hypernet")


@pytest.fixture(scope="session")
def lenet():
    return importlib.import_module("03_cifar_lenet")


@pytest.fixture(scope="session")
def resnet():
    return importlib.import_module("04_cifar_resnet32")
