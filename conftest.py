import gc
import os
import sys
import tempfile
from pathlib import Path

import pytest

os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"}
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # of pyarrow: tests fork from a process of one thread
CACHE = tempfile.TemporaryDirectory()  # of data sets, which datasets asks for when it is imported
os.environ["HF_DATASETS_CACHE"] = CACHE.name
ROOT = Path(__file__).resolve().parent
gc.set_threshold(100_000, 50, 1000)  # a search for garbage goes through all that torch has made
sys.path[:0] = [str(ROOT / name) for name in ("", "tests", "tools", "benchmark", "docs")]


# The mathematics. The tests of all other files train, start processes, or read whole datasets or pages.
FAST = {"losses", "process_rewards", "other_libraries", "exact_gradients", "answers", "copies"}


def is_fast(path):
    return path.stem.removeprefix("test_") in FAST


def pytest_ignore_collect(collection_path, config):
    """Do not even read the slow files with -m "not slow"."""
    if config.option.markexpr == "not slow" and collection_path.suffix == ".py" and not is_fast(collection_path):
        return True
    return None


def pytest_collection_modifyitems(items):
    """Mark the tests of slow files as slow, and those that need a folder, most of which train."""
    for item in items:
        folder = {"tmp_path", "tmp_path_factory"} & set(item.fixturenames)
        if folder or not is_fast(item.path):
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def alone():
    """A process group of one, as init_ranks makes it."""
    import torch  # not at the top: the process that only hands out tests needs none

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(store=torch.distributed.HashStore(), rank=0, world_size=1)


@pytest.fixture(autouse=True)
def as_before():
    """A main that has failed leaves its process group behind, and each one its precision of products and attention."""
    from transformers.integrations import sdpa_attention

    use_gqa = sdpa_attention.use_gqa_in_sdpa
    yield
    import torch

    sdpa_attention.use_gqa_in_sdpa = use_gqa
    torch.set_float32_matmul_precision("highest")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
