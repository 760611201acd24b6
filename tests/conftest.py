import os
import sys
from pathlib import Path

import pytest

os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def pytest_xdist_auto_num_workers(config):
    """Two processes for all tests; none of their own for files that are named."""
    return 0 if any(".py" in name for name in config.args) else 2


@pytest.fixture
def alone():
    """Leaves no process group of one behind."""
    import torch  # not at the top: the process that only hands out tests needs none

    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
