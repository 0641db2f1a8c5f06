import importlib
import os

import pytest

# Some virtual machines announce AMX but do not run it: bfloat16 would crash. Torch reads this once.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# Networks here are tiny: more threads gain nothing, and crawl where other programs run too.
os.environ.setdefault("OMP_NUM_THREADS", "1")


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
