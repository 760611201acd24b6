"""Make the numbers of Open Instruct again, from a checkout of allenai/open-instruct."""

from types import SimpleNamespace

import numpy
import torch
from common import between, execute, find, gradient, load, main, tensors


def compute_advantages(path, case, normalization):
    """Execute the statements of the class that prepares the data."""
    rewards = numpy.array(case["inputs"]["rewards"])
    config = SimpleNamespace(
        advantage_normalization_type=normalization,
        num_samples_per_prompt_rollout=rewards.shape[1],
    )
    namespace = {
        "np": numpy,
        "self": SimpleNamespace(config=config),
        "batch": SimpleNamespace(scores=rewards.reshape(-1)),
    }
    preparation = find(path, "DataPreparationActor")
    condition = "if self.config.advantage_normalization_type == 'standard'"
    execute(between(preparation, "scores = np.array(batch.scores)", condition), namespace)
    return namespace["advantages"].tolist()


def make_advantages(folder, case):
    path = folder / "open_instruct/data_loader.py"
    return {
        "open_instruct_standard": compute_advantages(path, case, "standard"),
        "open_instruct_centered": compute_advantages(path, case, "centered"),
    }


def make_kl(folder, case):
    """Call the function with the ratio 1 of a first step, whose gradient is that of the log-probabilities."""
    inputs = tensors(case["inputs"])
    logprobs = inputs["logp"].requires_grad_()
    estimate_kl = load(folder / "open_instruct/model_utils.py", "estimate_kl", {"torch": torch})
    estimates = estimate_kl(logprobs - inputs["ref_logp"], torch.exp(logprobs - logprobs.detach()))
    outputs = {}
    for name, estimate in zip(("k1", "k2", "k3", "ratio_k1"), estimates):
        outputs[f"open_instruct_{name}"] = estimate.tolist()
        outputs[f"open_instruct_{name}_grad"] = gradient(estimate.sum(), logprobs)
    return outputs


MAKERS = {"advantages": make_advantages, "kl": make_kl}


if __name__ == "__main__":
    main(MAKERS, lambda folder: folder)
