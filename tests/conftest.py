import os
import sys
from pathlib import Path

os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
import torch  # after the variables it reads

torch.set_num_threads(1)


@pytest.fixture
def alone():
    """Leaves no process group of one behind."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
