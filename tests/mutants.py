"""Plant known bugs, one at a time, and see that tests fail: python tests/mutants.py [WORDS ...] [--jobs 2].

A row of MUTANTS is a bug that was found in public code, or is easily made: its name, the scripts it is planted in, what
is replaced by what, and the tests that must fail, all of them; after a slash stands which of a test's cases. Code that
is identical in several scripts, as test_copies.py sees to, needs one test; code that is not needs one of each script.
"""

import argparse
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmark" / "results" / "mutants.md"
SECONDS = 600  # at most, per mutant
# Errors of a row that was written wrongly, and not what the bug does.
BROKEN = re.compile(r"(Name|Import|ModuleNotFound|Attribute|UnboundLocal|Type|Key|Index|Value|Runtime)Error")

TOKENWISE = "grpo dr_grpo dapo"
CLIPPED = f"{TOKENWISE} gspo"
OLD = f"{CLIPPED} cispo"  # those with log-probabilities of an older policy
ONLINE = f"{OLD} reinforce"
SAMPLED = f"{ONLINE} dpo ppo_rlhf"
LOGPROBS = f"{SAMPLED} sft"
ALL = f"{LOGPROBS} reward_model"
WEIGHTED = f"{ONLINE} ppo_rlhf"


@dataclass
class Mutant:
    name: str
    scripts: str
    old: str
    new: str
    tests: str | list[str]


def each(test, cases):
    """The test in each of these cases."""
    return [f"{test}/{case}" for case in (cases.split() if isinstance(cases, str) else cases)]


STEP_SEED = "torch.manual_seed(((args.seed * 1_000_003 + step) * 1_000_003 + rank) % 2**63)"
RESUME = "test_resume.py::test_run_killed_once_and_resumed_is_bit_identical"
ACCUMULATED = "test_gradients.py::test_accumulated_gradient_is_that_of_the_mean_loss"
CLIP = [f"test_{name}.py::test_where_the_clip_stops_the_gradient" for name in ("losses", "ppo")]
CLIP += each("test_family.py::test_where_the_clip_stops_the_gradient", "dr_grpo dapo")
CISPO_BY_HAND = "test_family.py::test_loss_gradient_and_metrics_by_hand/cispo"
CISPO_KEEPS = "test_family.py::test_cispo_caps_the_weight_and_keeps_the_gradient"
CISPO_EXACT = "test_family_gradients.py::test_cispo_has_the_gradient_of_its_weighted_log_probabilities"
PPO_BY_HAND = "test_ppo.py::test_policy_loss_gradient_and_metrics_by_hand"
OF_GROUPS = ["test_losses.py::test_advantages_by_hand"]
OF_GROUPS += each("test_gradients.py::test_expected_gradient_of_groups_of_two_is_exact", "grpo gspo dapo cispo")
ON_RANKS = "test_randomness.py::test_ranks_and_steps_draw_different_random_numbers"
SHARES = "test_randomness.py::test_ranks_share_the_rows_of_every_step"
STEPS = "test_steps.py::test_"
PRECISION = "test_precision.py::test_"
LORA = "test_lora.py::test_"
OF_ONE_TOKEN = (
    "test_sampler_weights.py::test_token_weights_are_exact_for_one_token_and_reduce_the_error_of_longer_completions"
)
OF_COMPLETIONS = "test_sampler_weights.py::test_weight_of_the_whole_completion_gives_the_gradient_of_the_objective"
CAPPED = "test_sampler_weights.py::test_weights_are_capped_and_old_calls_have_none"
SAMPLER_LOGPROBS = "test_rollouts.py::test_sampler_training_forward_and_plain_forward_give_the_same_logprobs"
PROCESS, PTX = "test_process.py::test_", "test_ptx.py::test_"
OF_STEPS = "test_family_gradients.py::test_step_rewards_to_come_give_the_gradient_of_their_expected_sum"
TO_THE_LAST_BIT = f"{PRECISION}the_reference_is_what_the_policy_was_to_the_last_bit"

MUTANTS = [
    # ---- which tokens count
    Mutant(
        "the stop token is not trained",
        SAMPLED,
        "completion_mask[rows, t] = 1",
        "completion_mask[rows, t] = torch.isin(tokens, stop_ids, invert=True).long()",
        "test_rollouts.py::test_every_stop_id_ends_a_completion_and_counts_in_the_mask",
    ),
    Mutant(
        "log-probabilities are masked by token id: ids != pad",
        LOGPROBS,
        "    completion_mask = completion_mask.bool()\n    ids = torch.cat(",
        "    completion_mask = completion_mask.bool() & (completion_ids != 0)\n    ids = torch.cat(",
        "test_logprobs.py::test_logprobs_of_a_padded_batch_are_those_of_each_sequence_alone",
    ),
    Mutant(
        "the mask of a rollout is by token id: ids != pad",
        SAMPLED,
        '"completion_mask": completion_mask,\n        "sampler_logprobs"',
        '"completion_mask": (completion_ids != pad_id).long(),\n        "sampler_logprobs"',
        "test_rollouts.py::test_a_completion_of_full_length_is_truncated_unless_it_ends_in_a_stop_id",
    ),
    Mutant(
        "what stands at masked positions reaches the loss",
        f"{OLD} ppo_rlhf",
        "log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0)",
        "log_ratio = logprobs - old_logprobs",
        [
            "test_losses.py::test_masked_positions_do_not_matter",
            *each("test_family.py::test_masked_positions_do_not_matter", "dr_grpo dapo gspo cispo"),
            "test_ppo.py::test_masked_positions_do_not_matter/policy_loss",
        ],
    ),
    # ---- log-probabilities
    Mutant(
        "a forward pass overwrites ids at padding in place",
        LOGPROBS,
        "    completion_mask = completion_mask.bool()\n    ids = torch.cat(",
        "    completion_mask = completion_mask.bool()\n    completion_ids[~completion_mask] = 9\n    ids = torch.cat(",
        f"{STEPS}a_forward_pass_leaves_ids_and_masks_as_they_are",
    ),
    Mutant(
        "the loss overwrites what it is given at padding",
        f"{OLD} ppo_rlhf",
        "log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0)",
        "old_logprobs[~mask] = 0.0\n    log_ratio = logprobs.where(mask, 0.0) - old_logprobs",
        [
            "test_losses.py::test_inputs_stay_as_they_are",
            *each("test_family.py::test_inputs_stay_as_they_are", "dr_grpo dapo gspo cispo"),
            "test_ppo.py::test_inputs_stay_as_they_are/policy_loss",
        ],
    ),
    Mutant(
        "logits are not divided by the temperature",
        LOGPROBS,
        "(head_logits(model, hidden) / temperature).log_softmax(-1)",
        "head_logits(model, hidden).log_softmax(-1)",
        "test_logprobs.py::test_logprobs_are_those_of_trl",
    ),
    Mutant(
        "the gradient is at temperature 1, samples are not",
        f"{ONLINE} ppo_rlhf",
        'part["completion_ids"], part["completion_mask"], args.temperature',
        'part["completion_ids"], part["completion_mask"], 1.0',
        [*each(ACCUMULATED, ONLINE), "test_ppo.py::test_accumulated_gradient_is_that_of_both_losses"],
    ),
    Mutant(
        "old log-probabilities are at temperature 1",
        OLD,
        "result, _ = policy(*inputs, temperature)",
        "result, _ = policy(*inputs, 1.0)",
        f"{STEPS}old_logprobs_are_those_of_the_policy_that_sampled/grpo",
    ),
    Mutant(
        "the entropy is at another temperature",
        LOGPROBS,
        "entropies = -(logprobs.exp() * logprobs).sum(-1)",
        "entropies = torch.distributions.Categorical(logits=logprobs * temperature).entropy()",
        "test_logprobs.py::test_logprobs_of_a_padded_batch_are_those_of_each_sequence_alone",
    ),
    Mutant(
        "the entropy is minus the log-probability of the sampled token",
        LOGPROBS,
        "entropies = -(logprobs.exp() * logprobs).sum(-1)",
        "entropies = -logprobs.gather(1, targets.unsqueeze(1)).squeeze(1)",
        "test_logprobs.py::test_entropies_are_those_of_others",
    ),
    Mutant(
        "a token is predicted from its own position",
        LOGPROBS,
        "completion_mask.cumsum(1)[rows, columns] - 2\n    logprobs",
        "completion_mask.cumsum(1)[rows, columns] - 1\n    logprobs",
        "test_logprobs.py::test_logprobs_of_a_padded_batch_are_those_of_each_sequence_alone",
    ),
    Mutant(
        "prompts stay padded on the left, without attention mask or position ids",
        LOGPROBS,
        "order = (~mask).long().argsort(dim=1, stable=True)[:, : mask.sum(1).max()]",
        "order = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)",
        "test_logprobs.py::test_ids_at_padding_do_not_matter",
    ),
    Mutant(
        "dropout is left on",
        f"{ONLINE} dpo sft",
        'if ("drop" in key or "jitter" in key) and isinstance(value, float):',
        'if "jitter" in key and isinstance(value, float):',
        "test_logprobs.py::test_dropout_is_off_in_train_mode",
    ),
    Mutant(
        "dropout of the reward model is left on",
        "reward_model",
        'if ("drop" in key or "jitter" in key) and isinstance(value, float):',
        'if "jitter" in key and isinstance(value, float):',
        "test_logprobs.py::test_dropout_of_a_reward_model_is_off_in_train_mode",
    ),
    Mutant(
        "parameters are trained in bfloat16",
        ALL,
        "auto_class.from_pretrained(name, config=config, dtype=torch.float32, **options)",
        'auto_class.from_pretrained(name, config=config, dtype="auto", **options)',
        "test_logprobs.py::test_parameters_are_float32_whatever_the_folder_holds",
    ),
    # ---- sampling
    Mutant(
        "positions count the padding while sampling",
        SAMPLED,
        "positions = (mask.cumsum(1) - 1).clamp(min=0)",
        "positions = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)",
        "test_rollouts.py::test_a_padded_batch_decodes_like_single_rows",
    ),
    Mutant(
        "padding is attended to while sampling",
        SAMPLED,
        "input_ids=ids, attention_mask=mask, position_ids=positions, **cache",
        "input_ids=ids, position_ids=positions, **cache",
        "test_rollouts.py::test_a_padded_batch_decodes_like_single_rows",
    ),
    Mutant(
        "rows that go on read the keys, values and states of others",
        SAMPLED,
        "layers.reorder_cache(rows)",
        "layers.reorder_cache(rows.flip(0))",
        "test_rollouts.py::test_a_padded_batch_decodes_like_single_rows",
    ),
    Mutant(
        "a cap on logits is left out",
        LOGPROBS,
        "return (logits / cap).tanh() * cap if cap else logits",
        "return logits",
        "test_logprobs.py::test_logits_are_scaled_and_capped_before_the_temperature/soft cap",
    ),
    Mutant(
        "a token of probability 0 can be sampled",
        SAMPLED,
        "torch.searchsorted(cdf, draw, right=True)",
        "torch.searchsorted(cdf, draw)",
        "test_rollouts.py::test_ids_of_probability_zero_are_never_sampled",
    ),
    Mutant(
        "decoding is greedy although a temperature is set",
        SAMPLED,
        "    if temperature == 0:",
        "    if temperature <= 1:",
        "test_rollouts.py::test_samples_follow_the_softmax_of_the_logits",
    ),
    Mutant(
        "sampling ignores the temperature",
        SAMPLED,
        "probabilities = (logits.float() / temperature).softmax",
        "probabilities = logits.float().softmax",
        "test_rollouts.py::test_samples_follow_the_softmax_of_the_logits",
    ),
    Mutant(
        "samples are of the top k, log-probabilities of all tokens",
        SAMPLED,
        "probabilities = (logits.float() / temperature).softmax",
        "logits = torch.where(logits < logits.topk(8).values[:, -1:], -torch.inf, logits)\n"
        "    probabilities = (logits.float() / temperature).softmax",
        "test_rollouts.py::test_samples_follow_the_softmax_of_the_logits",
    ),
    Mutant(
        "finished rows come back to life",
        SAMPLED,
        "running = (~ended).nonzero().squeeze(1)",
        "running = torch.ones_like(tokens).nonzero().squeeze(1)",
        "test_rollouts.py::test_every_stop_id_ends_a_completion_and_counts_in_the_mask",
    ),
    Mutant(
        "only the tokenizer's eos stops a completion",
        ALL,
        'configs = (getattr(model, "generation_config", tokenizer), model.config.get_text_config(), tokenizer)',
        "configs = (tokenizer,)",
        "test_rollouts.py::test_stop_ids_are_the_union_of_all_that_name_one",
    ),
    Mutant(
        "a completion of full length counts as truncated whatever its last token",
        SAMPLED,
        "ids[-1] not in stop_ids for ids in completions",
        "len(ids) == args.max_completion_length for ids in completions",
        "test_rollouts.py::test_a_completion_of_full_length_is_truncated_unless_it_ends_in_a_stop_id",
    ),
    Mutant(
        "a completion that ends in another stop token than eos counts as truncated",
        SAMPLED,
        "ids[-1] not in stop_ids for ids in completions",
        "ids[-1] != tokenizer.eos_token_id for ids in completions",
        "test_rollouts.py::test_a_completion_of_full_length_is_truncated_unless_it_ends_in_a_stop_id",
    ),
    # ---- rewards
    Mutant(
        "rewards are shuffled against prompts",
        SAMPLED,
        "[prompt for prompt in prompts for _ in range(num_samples)])",
        "[prompt for prompt in prompts[::-1] for _ in range(num_samples)])",
        f"{STEPS}a_reward_is_that_of_its_own_prompt_and_completion",
    ),
    Mutant(
        "completions of one prompt are not adjacent",
        SAMPLED,
        "prompts = [prompt for prompt in prompts for _ in range(num_samples)]",
        "prompts = prompts * num_samples",
        f"{STEPS}a_reward_is_that_of_its_own_prompt_and_completion",
    ),
    Mutant(
        "an answer inside a thought counts",
        SAMPLED,
        'elif part != "<think>" and not thinking:',
        'elif part != "<think>":',
        "test_rewards.py::test_extract_answer",
    ),
    Mutant(
        "the last number of a text is its answer",
        SAMPLED,
        "return text[opening + 8 : closing] if 0 <= opening < closing else None",
        'return text[opening + 8 : closing] if 0 <= opening < closing else (re.findall("[0-9]+", text) or [None])[-1]',
        "test_rewards.py::test_extract_answer",
    ),
    Mutant(
        "the first box counts, not the last",
        SAMPLED,
        "        start, end = opening, brace.end()\n",
        "        start, end = opening, brace.end()\n        break\n",
        "test_rewards.py::test_extract_answer",
    ),
    Mutant(
        "the sign of an answer is dropped",
        SAMPLED,
        'Fraction(match[1] + re.sub(r"[^0-9.]", "", match[2]))',
        'Fraction(re.sub(r"[^0-9.]", "", match[2]))',
        "test_rewards.py::test_parse_answer",
    ),
    Mutant(
        "everything is right where the answer of the data cannot be read",
        SAMPLED,
        "given is not None and gold is not None and parse_answer(given) == gold",
        "given is not None and (gold is None or parse_answer(given) == gold)",
        "test_rewards.py::test_a_hostile_ground_truth_raises_nothing",
    ),
    # ---- advantages
    Mutant(
        "no standard deviation in the advantages",
        "grpo dapo gspo cispo",
        " / (std + 1e-4)",
        "",
        OF_GROUPS,
    ),
    Mutant(
        "the standard deviation has ddof 0",
        "grpo dapo gspo cispo",
        "std = groups.std(1, keepdim=True, correction=min(1, group_size - 1))",
        "std = groups.std(1, keepdim=True, correction=0)",
        OF_GROUPS,
    ),
    Mutant(
        "a large epsilon beside the standard deviation",
        "grpo dapo gspo cispo",
        " / (std + 1e-4)",
        " / (std + 1e-1)",
        OF_GROUPS,
    ),
    Mutant(
        "the standard deviation is that of the batch",
        "grpo dapo gspo cispo",
        "std = groups.std(1, keepdim=True, correction=min(1, group_size - 1))",
        "std = groups.std()",
        OF_GROUPS,
    ),
    Mutant(
        "equal rewards have advantages by rounding",
        ONLINE,
        "return torch.where(equal, 0.0, advantages).view(-1)",
        "return advantages.view(-1)",
        [
            "test_losses.py::test_equal_rewards_have_advantage_exactly_0",
            *each(
                "test_family.py::test_group_of_equal_rewards_has_no_gradient_in_float32",
                "dr_grpo dapo gspo reinforce cispo",
            ),
        ],
    ),
    Mutant(
        "groups are taken across prompts",
        ONLINE,
        "groups = rewards.view(-1, group_size)  # (B/G, G)",
        "groups = rewards.view(group_size, -1)  # (B/G, G)",
        [
            "test_losses.py::test_advantages_by_hand",
            *each(
                "test_family.py::test_advantages_are_centred_and_ignore_a_shift_of_the_rewards",
                "dr_grpo dapo gspo reinforce cispo",
            ),
        ],
    ),
    Mutant(
        "Dr. GRPO divides by the standard deviation",
        "dr_grpo",
        "advantages = groups - groups.mean(1, keepdim=True)",
        "advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)",
        "test_family.py::test_advantages_by_hand",
    ),
    Mutant(
        "Dr. GRPO rewards truncated completions",
        "dr_grpo",
        "return torch.where(truncated, lowest, rewards)",
        "return rewards",
        "test_training.py::test_dr_grpo_counts_truncated_completions_as_wrong",
    ),
    Mutant(
        "leave-one-out without G / (G - 1)",
        "reinforce",
        "advantages = advantages * group_size / max(1, group_size - 1)",
        "pass",
        "test_family.py::test_advantages_by_hand",
    ),
    # ---- the ratio and its clip
    Mutant(
        "the larger of the two surrogates",
        f"{TOKENWISE} ppo_rlhf",
        "token_loss = -weight * torch.min(",
        "token_loss = -weight * torch.max(",
        CLIP,
    ),
    Mutant(
        "the clipped surrogate alone",
        f"{CLIPPED} ppo_rlhf",
        "-weight * torch.min(ratio * advantages, clipped_ratio * advantages)",
        "-weight * (clipped_ratio * advantages)",
        [*CLIP, "test_family.py::test_where_the_clip_stops_the_gradient/gspo"],
    ),
    Mutant(
        "the ratio is clipped from above only",
        "grpo dr_grpo ppo_rlhf",
        "ratio.clamp(1 - clip_eps, 1 + clip_eps)",
        "ratio.clamp(max=1 + clip_eps)",
        CLIP[:3],
    ),
    Mutant(
        "the lower and the upper clip range are swapped",
        "dapo gspo",
        "ratio.clamp(1 - clip_eps_low, 1 + clip_eps_high)",
        "ratio.clamp(1 - clip_eps_high, 1 + clip_eps_low)",
        [
            "test_family.py::test_dapo_clips_higher_above_than_below",
            "test_family.py::test_gspo_clips_whole_completions",
        ],
    ),
    Mutant(
        "a second clip for bad tokens (dual clip)",
        f"{TOKENWISE} ppo_rlhf",
        "-weight * torch.min(ratio * advantages, clipped_ratio * advantages)",
        "-weight * torch.min(ratio.clamp(max=3.0) * advantages, clipped_ratio * advantages)",
        CLIP,
    ),
    Mutant(
        "the ratio is inverted",
        f"{OLD} ppo_rlhf",
        "log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0)",
        "log_ratio = torch.where(mask, old_logprobs - logprobs, 0.0)",
        [*CLIP, "test_family.py::test_where_the_clip_stops_the_gradient/gspo", CISPO_BY_HAND],
    ),
    Mutant(
        "GSPO's ratio is the product over tokens",
        "gspo",
        "ratio = (log_ratio.sum(1) / lengths).exp()",
        "ratio = log_ratio.sum(1).exp()",
        "test_family.py::test_loss_gradient_and_metrics_by_hand",
    ),
    Mutant(
        "GSPO's mean is over the padded width",
        "gspo",
        "ratio = (log_ratio.sum(1) / lengths).exp()",
        "ratio = log_ratio.mean(1).exp()",
        "test_family.py::test_padding_columns_do_not_matter",
    ),
    Mutant(
        "old log-probabilities are not detached",
        f"{OLD} ppo_rlhf",
        "logprobs.detach() if on_policy",
        "logprobs if on_policy",
        [*each(ACCUMULATED, OLD), "test_ppo.py::test_on_policy_the_ratio_is_1"],
    ),
    Mutant(
        "every minibatch is taken for on policy",
        f"{OLD} ppo_rlhf",
        "divisors[-1], update == 0, args)",
        "divisors[-1], True, args)",
        each(f"{STEPS}the_first_minibatch_is_on_policy_and_no_other", f"{OLD} ppo_rlhf"),
    ),
    Mutant(
        "old log-probabilities are of the rows of the first minibatch",
        OLD,
        "later_rows = orders[0][len(minibatches[0]) if args.update_epochs == 1 else 0 :]",
        "later_rows = orders[0][: len(minibatches[0])]",
        each(f"{STEPS}old_logprobs_are_those_of_the_policy_that_sampled", OLD),
    ),
    Mutant(
        "the first minibatch has no old log-probabilities in the second epoch",
        "grpo",
        "later_rows = orders[0][len(minibatches[0]) if args.update_epochs == 1 else 0 :]",
        "later_rows = orders[0][len(minibatches[0]) :]",
        f"{STEPS}old_logprobs_are_those_of_the_policy_that_sampled/grpo without KL",
    ),
    Mutant(
        "log-probabilities come back in the order of microbatches",
        OLD,
        'index_copy(0, part["rows"], result',
        'index_copy(0, rows[: len(part["rows"])], result',
        "test_logprobs.py::test_logprobs_are_looked_up_for_the_given_rows_only",
    ),
    # ---- the KL term
    Mutant(
        "k3 has the inverted ratio",
        "grpo",
        "torch.where(mask, ref_logprobs - logprobs, 0.0)",
        "torch.where(mask, logprobs - ref_logprobs, 0.0)",
        "test_losses.py::test_k3_has_the_right_direction",
    ),
    Mutant(
        "k1 in the loss, whose expected gradient is 0",
        "grpo",
        "token_kl = ref_log_ratio.exp() - ref_log_ratio - 1",
        "token_kl = -ref_log_ratio",
        "test_gradients.py::test_kl_term_by_whole_distributions",
    ),
    Mutant(
        "the KL term is subtracted from the loss",
        "grpo",
        "loss = loss + kl_coef * kl",
        "loss = loss - kl_coef * kl",
        "test_losses.py::test_gradient_by_hand",
    ),
    Mutant(
        "the KL term has no gradient",
        "grpo",
        "kl = (weight * token_kl / lengths.unsqueeze(1)).sum()",
        "kl = (weight * token_kl.detach() / lengths.unsqueeze(1)).sum()",
        "test_losses.py::test_gradient_by_hand",
    ),
    Mutant(
        "the KL term is a sum over tokens where the loss is a mean",
        "grpo",
        "kl = (weight * token_kl / lengths.unsqueeze(1)).sum()",
        "kl = (weight * token_kl).sum()",
        "test_losses.py::test_loss_by_hand",
    ),
    Mutant(
        "the reference follows the policy",
        "grpo",
        "lookup_logprobs(ref, batch, orders[0]",
        "lookup_logprobs(policy, batch, orders[0]",
        f"{STEPS}the_reference_stays_the_initial_model",
    ),
    Mutant(
        "rows of advantage 0 are dropped although the KL term needs them",
        "grpo",
        'live = (batch["advantages"] != 0) | (ref is not None)',
        'live = batch["advantages"] != 0',
        f"{STEPS}the_kl_term_pulls_rows_of_advantage_0",
    ),
    # ---- what the loss is divided by
    Mutant(
        "GRPO does not divide by the length of a completion",
        "grpo",
        "(torch.where(mask, token_loss, 0.0).sum(1) / lengths).sum()",
        "torch.where(mask, token_loss, 0.0).sum()",
        "test_losses.py::test_loss_by_hand",
    ),
    Mutant(
        "GRPO's mean over tokens is over the padded width",
        "grpo",
        "lengths = mask.sum(1).clamp(min=1)  # (B,)",
        "lengths = torch.full_like(mask.sum(1), mask.shape[1])  # (B,)",
        "test_losses.py::test_padding_columns_do_not_matter",
    ),
    Mutant(
        "Dr. GRPO divides by each length",
        "dr_grpo",
        "torch.where(mask, token_loss, 0.0).sum() / max_completion_length",
        "(torch.where(mask, token_loss, 0.0).sum(1) / mask.sum(1).clamp(min=1)).sum()",
        "test_family.py::test_loss_gradient_and_metrics_by_hand",
    ),
    Mutant(
        "REINFORCE takes the mean over tokens",
        "reinforce",
        "(advantages * (weight * logprobs).sum(1)).sum()",
        "(advantages * (weight * logprobs).mean(1)).sum()",
        "test_family_gradients.py::test_expected_gradient_is_that_of_the_expected_reward",
    ),
    Mutant(
        "each microbatch has its own mean",
        ALL,
        "(loss * (world_size / divisor)).backward()",
        '(loss * (world_size / max(1, len(part["rows"])))).backward()',
        [
            *each("test_gradients.py::test_microbatches_change_neither_gradient_nor_metrics", ONLINE),
            "test_ppo.py::test_microbatches_change_neither_gradient_nor_metrics",
            *each("test_preferences.py::test_microbatches_change_neither_gradient_nor_metrics", "dpo reward_model"),
            "test_sft.py::test_loss_and_gradient_are_those_of_the_trained_tokens_alone",
        ],
    ),
    Mutant(
        "rows of advantage 0 do not count in the divisor",
        "grpo dr_grpo gspo",
        "divisors.append(args.minibatch_size)",
        "divisors.append(max(1, int(live[rows].sum())))",
        each(f"{STEPS}rows_without_gradient_count_in_the_divisor", ["grpo without KL", "dr_grpo", "gspo"]),
    ),
    Mutant(
        "REINFORCE divides by the rows that have an advantage",
        "reinforce",
        "divisor = args.prompts_per_step * args.group_size",
        'divisor = max(1, int((batch["advantages"] != 0).sum()))',
        f"{STEPS}rows_without_gradient_count_in_the_divisor",
    ),
    Mutant(
        "DAPO divides by completions",
        "dapo",
        'max(1, all_reduce(batch["completion_mask"][rows].sum()))',
        "args.minibatch_size",
        "test_dapo.py::test_every_minibatch_is_divided_by_its_own_tokens",
    ),
    Mutant(
        "DAPO divides by the padded tokens",
        "dapo",
        'all_reduce(batch["completion_mask"][rows].sum())',
        'all_reduce(batch["completion_mask"][rows].numel())',
        "test_dapo.py::test_every_minibatch_is_divided_by_its_own_tokens",
    ),
    Mutant(
        "DAPO divides by the tokens of rows that have an advantage",
        "dapo",
        'all_reduce(batch["completion_mask"][rows].sum())',
        'all_reduce(batch["completion_mask"][rows[live[rows]]].sum())',
        "test_dapo.py::test_tokens_of_zero_advantage_count_in_the_divisor",
    ),
    Mutant(
        "DAPO divides by the tokens of one rank",
        "dapo",
        'all_reduce(batch["completion_mask"][rows].sum())',
        'float(batch["completion_mask"][rows].sum())',
        "test_randomness.py::test_ranks_divide_by_one_number/dapo",
    ),
    Mutant(
        "PPO divides by the tokens of one rank",
        "ppo_rlhf",
        "divisors.append(all_reduce(mask[rows].sum()))",
        "divisors.append(float(mask[rows].sum()))",
        "test_randomness.py::test_ranks_divide_by_one_number/ppo_rlhf",
    ),
    Mutant(
        "SFT divides by the tokens of one rank",
        "sft",
        'divisor = sum(sum(row["trained"]) for row in picked)',
        'divisor = sum(sum(row["trained"]) for row in share)',
        "test_randomness.py::test_ranks_divide_by_one_number/sft",
    ),
    # ---- DAPO's own
    Mutant(
        "the overlong penalty is not applied",
        "dapo",
        'batch["trained_rewards"] = 2 * batch["rewards"] - 1 + penalty',
        'batch["trained_rewards"] = 2 * batch["rewards"] - 1',
        "test_dapo.py::test_advantages_have_the_mapped_reward_and_the_metrics_the_rules",
    ),
    Mutant(
        "the overlong penalty begins at the limit",
        "dapo",
        "excess = lengths - (max_completion_length - overlong_buffer)",
        "excess = lengths - max_completion_length",
        "test_family.py::test_overlong_penalty_by_hand",
    ),
    Mutant(
        "DAPO's wrong answers have reward 0, not -1",
        "dapo",
        'batch["trained_rewards"] = 2 * batch["rewards"] - 1 + penalty',
        'batch["trained_rewards"] = batch["rewards"] + penalty',
        "test_dapo.py::test_advantages_have_the_mapped_reward_and_the_metrics_the_rules",
    ),
    Mutant(
        "groups with signal are thrown away, those without are kept",
        "dapo",
        "return (groups != groups[:, :1]).any(1)",
        "return (groups == groups[:, :1]).all(1)",
        "test_family.py::test_has_signal",
    ),
    Mutant(
        "groups without signal are kept",
        "dapo",
        "groups = has_signal(rewards, args.group_size).nonzero()",
        "groups = torch.ones_like(has_signal(rewards, args.group_size)).nonzero()",
        "test_dapo.py::test_first_groups_with_signal_are_kept_in_order",
    ),
    Mutant(
        "every round samples the same prompts",
        "dapo",
        "pick_rows(prompts, start + done * args.prompts_per_step,",
        "pick_rows(prompts, start,",
        "test_dapo.py::test_prompts_are_consumed_in_order_without_gaps_or_repeats",
    ),
    # ---- the optimizer
    Mutant(
        "the gradient is never clipped",
        f"{ONLINE} dpo reward_model sft",
        "clip_grad_norm_(policy.parameters(), max_grad_norm)",
        "clip_grad_norm_(policy.parameters(), math.inf)",
        f"{STEPS}a_gradient_is_scaled_down_to_the_largest_norm",
    ),
    Mutant(
        "PPO's gradients are never clipped",
        "ppo_rlhf",
        'clip_grad_norm_(group["params"], max_grad_norm)',
        'clip_grad_norm_(group["params"], math.inf)',
        f"{STEPS}gradients_of_policy_and_value_model_are_scaled_down_apart",
    ),
    Mutant(
        "policy and value model are clipped as one",
        "ppo_rlhf",
        'clip_grad_norm_(group["params"], max_grad_norm)',
        'clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], max_grad_norm)',
        f"{STEPS}gradients_of_policy_and_value_model_are_scaled_down_apart",
    ),
    Mutant(
        "zero_grad is forgotten",
        ALL,
        "optimizer.zero_grad()",
        "pass",
        each(f"{STEPS}an_optimizer_step_has_no_gradient_of_the_one_before", ALL),
    ),
    Mutant(
        "the warm-up begins one step late, at learning rate 0",
        f"{OLD} ppo_rlhf",
        "optimizer_step = (step - 1) * len(minibatches) + update + 1",
        "optimizer_step = (step - 1) * len(minibatches) + update",
        each(f"{STEPS}the_learning_rate_rises_over_the_warm_up", f"{OLD} ppo_rlhf"),
    ),
    Mutant(
        "the warm-up counts rollouts, not optimizer steps",
        f"{OLD} ppo_rlhf",
        "optimizer_step = (step - 1) * len(minibatches) + update + 1",
        "optimizer_step = step",
        each(f"{STEPS}the_learning_rate_rises_over_the_warm_up", f"{OLD} ppo_rlhf"),
    ),
    Mutant(
        "the warm-up of one step per batch begins one step late",
        "reinforce dpo reward_model sft",
        "step / max(1, args.warmup_steps)",
        "(step - 1) / max(1, args.warmup_steps)",
        each(f"{STEPS}the_learning_rate_rises_over_the_warm_up", "reinforce dpo reward_model sft"),
    ),
    # ---- several ranks
    Mutant(
        "FSDP's mean over ranks is not undone: the factor world size is missing",
        ONLINE,
        "(loss * (world_size / divisor)).backward()",
        "(loss / divisor).backward()",
        each("test_gradients.py::test_two_ranks_have_the_gradient_and_metrics_of_one", ONLINE),
    ),
    Mutant(
        "the factor world size is missing with pairs and values",
        "dpo reward_model ppo_rlhf",
        "(loss * (world_size / divisor)).backward()",
        "(loss / divisor).backward()",
        each("test_preferences.py::test_two_ranks_have_the_gradient_and_metrics_of_one", "dpo reward_model ppo_rlhf"),
    ),
    Mutant(
        "the factor world size is missing in SFT",
        "sft",
        "(loss * (world_size / divisor)).backward()",
        "(loss / divisor).backward()",
        "test_randomness.py::test_two_ranks_of_sft_train_as_one_process_does",
    ),
    Mutant(
        "every rank samples the same prompts",
        "grpo dr_grpo gspo reinforce ppo_rlhf cispo",
        "            prompts = prompts[rank::world_size]\n",
        "",
        each(SHARES, "grpo dr_grpo gspo reinforce ppo_rlhf cispo"),
    ),
    Mutant(
        "every rank of DAPO samples the same prompts",
        "dapo",
        "        picked = picked[rank::world_size]\n",
        "",
        f"{SHARES}/dapo",
    ),
    Mutant(
        "every rank trains on all rows of the batch",
        "sft",
        "share = picked[rank::world_size]",
        "share = picked",
        f"{SHARES}/sft",
    ),
    Mutant(
        "every rank trains on all pairs of the batch",
        "dpo reward_model",
        "share = picked[rank::world_size]",
        "share = picked",
        each("test_preference_runs.py::test_two_ranks_train_as_one_process_does", "dpo reward_model"),
    ),
    Mutant(
        "every rank draws the same random numbers",
        f"{ONLINE} ppo_rlhf",
        STEP_SEED,
        STEP_SEED.replace(" + rank", ""),
        each(ON_RANKS, f"{ONLINE} ppo_rlhf"),
    ),
    Mutant(
        "every step draws the same random numbers",
        f"{ONLINE} ppo_rlhf",
        STEP_SEED,
        STEP_SEED.replace(" + step", ""),
        each(ON_RANKS, f"{ONLINE} ppo_rlhf"),
    ),
    Mutant(
        "the model that samples is never updated",
        f"{ONLINE} ppo_rlhf",
        '            sync_sampler(policy, sampler)\n            clock["update"]',
        '            clock["update"]',
        each("test_randomness.py::test_a_rollout_is_of_the_policy_as_it_is_trained", f"{ONLINE} ppo_rlhf"),
    ),
    Mutant(
        "a maximum is summed over ranks",
        ONLINE,
        "all_reduce([float(metrics[key]) for key in maxima], dist.ReduceOp.MAX)",
        "all_reduce([float(metrics[key]) for key in maxima])",
        "test_gradients.py::test_two_ranks_have_the_gradient_and_metrics_of_one",
    ),
    Mutant(
        "every rank evaluates all held-out prompts",
        SAMPLED,
        "prompts[rank::world_size], ",
        "prompts, ",
        each("test_evaluation.py::test_ranks_share_the_held_out_prompts", SAMPLED),
    ),
    # ---- resuming
    Mutant(
        "the state of the optimizer is not restored",
        ALL,
        "dcp.load(state,",
        'dcp.load({"model": model_state},',
        f"{RESUME}[dr_grpo-flags1-10]",
    ),
    Mutant(
        "random numbers are not a function of the step",
        "reinforce",
        STEP_SEED,
        "if step == last_step + 1:\n            torch.manual_seed(args.seed * 1_000_003 + rank)",
        f"{RESUME}[reinforce-flags0-5]",
    ),
    Mutant(
        "a resumed run begins the data again",
        "reinforce",
        "pick_rows(train_prompts, (step - 1) * args.prompts_per_step,",
        "pick_rows(train_prompts, (step - 1 - max(0, last_step)) * args.prompts_per_step,",
        f"{RESUME}[reinforce-flags0-5]",
    ),
    Mutant(
        "a resumed run of DAPO begins the data again",
        "dapo",
        'num_consumed = json.loads(lines[-1])["rollout/prompts_consumed"] if lines else 0',
        "num_consumed = 0",
        f"{RESUME}[dapo-flags2-10]",
    ),
    Mutant(
        "a resumed run warms up again",
        "gspo",
        "optimizer_step = (step - 1) * len(minibatches) + update + 1",
        "optimizer_step = (step - 1 - max(0, last_step)) * len(minibatches) + update + 1",
        f"{RESUME}[gspo-flags3-10]",
    ),
    Mutant(
        "a resumed run trains on its last batch again",
        "reinforce",
        "for step in range(last_step + 1, args.num_steps + 1):",
        "for step in range(max(0, last_step), args.num_steps + 1):",
        f"{RESUME}[reinforce-flags0-5]",
    ),
    # ---- metrics and evaluation
    Mutant(
        "a resumed run logs steps twice",
        ALL,
        'if line.endswith(b"\\n") and json.loads(line)["step"] <= last_step:',
        'if line.endswith(b"\\n"):',
        "test_resume.py::test_killed_and_resumed_run_is_bit_identical",
    ),
    Mutant(
        "a second run writes into the folder of the first",
        ALL,
        "if os.path.lexists(run_dir) and not",
        "if False and not",
        "test_cli.py::test_a_run_folder_that_exists_is_left_alone",
    ),
    Mutant(
        "metrics are summed over tokens and not divided",
        ONLINE,
        'total if key.endswith("_max") else total / max(1, count)',
        "total",
        f"{STEPS}losses_and_policy_metrics_are_means_over_the_whole_step/grpo",
    ),
    Mutant(
        "metrics are those of the last microbatch",
        ALL,
        'torch.maximum(before, value) if key.endswith("_max") else before + value',
        'torch.maximum(before, value) if key.endswith("_max") else value',
        "test_gradients.py::test_microbatches_change_neither_gradient_nor_metrics",
    ),
    Mutant(
        "the gradient norm is that of the last minibatch",
        OLD,
        '"optim/grad_norm": sum(grad_norms) / len(grad_norms)',
        '"optim/grad_norm": grad_norms[-1]',
        each(f"{STEPS}losses_and_policy_metrics_are_means_over_the_whole_step", OLD),
    ),
    Mutant(
        "the learning rate that is logged is not the one that is used",
        f"{ONLINE} dpo reward_model sft",
        '"optim/learning_rate": learning_rate}',
        '"optim/learning_rate": args.learning_rate}',
        each(f"{STEPS}the_learning_rate_rises_over_the_warm_up", f"{ONLINE} dpo reward_model sft"),
    ),
    Mutant(
        "what is outside the range but not clipped counts as clipped",
        "grpo dr_grpo ppo_rlhf",
        "(mask & (ratio > 1 + clip_eps) & (advantages > 0)).sum()",
        "(mask & (ratio > 1 + clip_eps)).sum()",
        ["test_losses.py::test_metrics_by_hand", "test_family.py::test_what_counts_as_clipped/dr_grpo", PPO_BY_HAND],
    ),
    Mutant(
        "pass@k is 1 - (1 - p)^k, which is biased",
        SAMPLED,
        "1 - math.comb(EVAL_SAMPLES - correct, k) / math.comb(EVAL_SAMPLES, k)",
        "1 - (1 - correct / EVAL_SAMPLES) ** k",
        each("test_evaluation.py::test_pass_at_k_is_the_mean_over_all_choices_of_k_samples", SAMPLED),
    ),
    Mutant(
        "accuracy counts every reward over 0",
        SAMPLED,
        'sums["eval/accuracy"] += is_right(texts[number], row["answer"])',
        'sums["eval/accuracy"] += score_completions([texts[number]], [row])[0] > 0',
        each("test_evaluation.py::test_accuracy_counts_right_greedy_completions_whatever_the_reward_is", SAMPLED),
    ),
    Mutant(
        "accuracy is of samples, not of greedy completions",
        f"{ONLINE} dpo",
        "rollout(model, tokenizer, share, 1, 0.0, stop_ids, args)",
        "rollout(model, tokenizer, share, 1, args.temperature, stop_ids, args)",
        "test_evaluation.py::test_one_greedy_completion_and_samples_at_the_temperature_of_training",
    ),
    # ---- data
    Mutant(
        "held-out rows are trained on",
        ALL,
        "train = train.select(range(len(train) - num_held_out))",
        "pass",
        "test_data.py::test_a_file_gives_its_last_rows_as_held_out",
    ),
    Mutant(
        "every pass over the data has the same order",
        ALL,
        "torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)",
        "torch.Generator().manual_seed(seed * 1_000_003)",
        "test_data.py::test_a_pass_covers_every_row_once",
    ),
    Mutant(
        "two BOS tokens: the template's text is tokenised again",
        ALL,
        'return tokenizer.apply_chat_template(messages, **options)["input_ids"]',
        "text = tokenizer.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, tokenize=False)\n"
        '        return tokenizer(text)["input_ids"]',
        "test_data.py::test_prompts_with_a_chat_template_have_one_bos_and_one_system_message",
    ),
    Mutant(
        "the prompt does not end where the assistant begins",
        ALL,
        "return render_chat(tokenizer, messages, True)",
        "return render_chat(tokenizer, messages, False)",
        "test_data.py::test_prompts_with_a_chat_template_have_one_bos_and_one_system_message",
    ),
    Mutant(
        "long prompts are cut",
        SAMPLED,
        'return None, f"dropped, longer than {max_prompt_length} tokens"',
        "prompt_ids = prompt_ids[-max_prompt_length:]",
        "test_data.py::test_long_prompts_are_dropped_and_counted",
    ),
    # ---- PPO
    Mutant(
        "the score stands one token before the last",
        "ppo_rlhf",
        "(mask * positions).amax(1, keepdim=True))",
        "(mask * positions).amax(1, keepdim=True) - 1)",
        "test_ppo.py::test_token_rewards_by_hand",
    ),
    Mutant(
        "the score stands in the last column, padding or not",
        "ppo_rlhf",
        "is_last = mask & (positions == (mask * positions).amax(1, keepdim=True))",
        "is_last = (positions == mask.shape[1] - 1).expand_as(mask)",
        "test_ppo.py::test_token_rewards_by_hand",
    ),
    Mutant(
        "the value after the last token is bootstrapped",
        "ppo_rlhf",
        "torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])",
        "values[:, -1], torch.zeros_like(values[:, 0])",
        "test_ppo.py::test_advantages_and_returns_by_hand",
    ),
    Mutant(
        "advantages without lambda",
        "ppo_rlhf",
        "next_advantage = delta + gamma * gae_lambda * next_advantage",
        "next_advantage = delta + gamma * next_advantage",
        "test_ppo.py::test_advantages_and_returns_by_hand",
    ),
    Mutant(
        "the value of a token is read after it",
        "ppo_rlhf",
        "completion_mask.cumsum(1)[rows, columns] - 2\n    values",
        "completion_mask.cumsum(1)[rows, columns] - 1\n    values",
        "test_ppo.py::test_values_are_scores_of_the_prefixes",
    ),
    Mutant(
        "advantages are whitened over the padding",
        "ppo_rlhf",
        "all_reduce([x.double().sum().item(), mask.sum().item()])",
        "all_reduce([x.double().sum().item(), mask.numel()])",
        "test_ppo.py::test_whiten_by_hand",
    ),
    Mutant(
        "advantages are not whitened",
        "ppo_rlhf",
        '"advantages": whiten(advantages, mask)',
        '"advantages": advantages',
        f"{STEPS}ppo_whitens_advantages_and_not_returns",
    ),
    Mutant(
        "returns are made of whitened advantages",
        "ppo_rlhf",
        '"returns": returns}',
        '"returns": whiten(advantages, mask) + old_values}',
        f"{STEPS}ppo_whitens_advantages_and_not_returns",
    ),
    Mutant(
        "the smaller of the two value losses",
        "ppo_rlhf",
        "torch.maximum(error.square(), clipped_error.square())",
        "torch.minimum(error.square(), clipped_error.square())",
        "test_ppo.py::test_value_loss_by_hand",
    ),
    Mutant(
        "values are not clipped around the old ones",
        "ppo_rlhf",
        "torch.maximum(torch.minimum(values, old_values + value_clip_eps), old_values - value_clip_eps)",
        "values",
        "test_ppo.py::test_value_loss_by_hand",
    ),
    Mutant(
        "the penalty for a missing stop token is forgotten",
        "ppo_rlhf",
        'return scores - args.missing_stop_penalty * batch["truncated"].to(scores.dtype)',
        "return scores",
        "test_evaluation.py::test_the_penalty_is_in_units_of_the_normalised_score",
    ),
    Mutant(
        "scores are not normalised",
        "ppo_rlhf",
        "scores = (scores - policy.score_mean) / policy.score_std",
        "pass",
        "test_evaluation.py::test_the_penalty_is_in_units_of_the_normalised_score",
    ),
    Mutant(
        "a resumed run normalises scores by those of the trained policy",
        "ppo_rlhf",
        "    if last_step <= 0:\n        torch.manual_seed",
        "    if last_step >= -1:\n        torch.manual_seed",
        "test_preference_runs.py::test_resumed_ppo_reads_its_normalisation_from_the_run_folder",
    ),
    Mutant(
        "divergence from the reference is rewarded",
        "ppo_rlhf",
        "rewards = rewards - kl_coef * torch.where(mask, old_logprobs - ref_logprobs, 0.0)",
        "rewards = rewards + kl_coef * torch.where(mask, old_logprobs - ref_logprobs, 0.0)",
        "test_ppo.py::test_token_rewards_by_hand",
    ),
    Mutant(
        "k3 in the reward, whose gradient is not that of the KL",
        "ppo_rlhf",
        "rewards = rewards - kl_coef * torch.where(mask, old_logprobs - ref_logprobs, 0.0)",
        "ref_log_ratio = torch.where(mask, ref_logprobs - old_logprobs, 0.0)\n"
        "        rewards = rewards - kl_coef * (ref_log_ratio.exp() - ref_log_ratio - 1)",
        "test_ppo.py::test_expected_gradient_is_exact_with_exact_values",
    ),
    Mutant(
        "values and log-probabilities come back in the order of microbatches",
        "ppo_rlhf",
        "order = torch.cat(done).argsort()",
        "order = torch.cat(done).sort().values",
        "test_ppo.py::test_looked_up_numbers_are_in_the_order_of_the_rows",
    ),
    # ---- DPO and the reward model
    Mutant(
        "label smoothing is swapped",
        "dpo",
        "losses = -(1 - label_smoothing) * nn.functional.logsigmoid(margins)\n    losses = losses - label_smoothing *",
        "losses = -label_smoothing * nn.functional.logsigmoid(margins)\n    losses = losses - (1 - label_smoothing) *",
        "test_preferences.py::test_dpo_loss_by_hand",
    ),
    Mutant(
        "beta is forgotten",
        "dpo",
        "margins = beta * (chosen_log_ratios - rejected_log_ratios)",
        "margins = chosen_log_ratios - rejected_log_ratios",
        "test_preferences.py::test_dpo_loss_by_hand",
    ),
    Mutant(
        "DPO prefers the rejected completion",
        "dpo",
        "margins = beta * (chosen_log_ratios - rejected_log_ratios)",
        "margins = beta * (rejected_log_ratios - chosen_log_ratios)",
        "test_preferences.py::test_dpo_loss_is_that_of_its_authors",
    ),
    Mutant(
        "DPO without reference",
        "dpo",
        "rejected_log_ratios = rejected_logprobs - ref_rejected_logprobs",
        "rejected_log_ratios = rejected_logprobs",
        "test_preferences.py::test_policy_that_is_the_reference_has_log_2",
    ),
    Mutant(
        "log-probabilities of a completion are averaged, not summed",
        "dpo",
        "logprobs.sum(1).chunk(2)",
        "logprobs.mean(1).chunk(2)",
        "test_preferences.py::test_accumulated_gradient_is_that_of_the_mean_loss",
    ),
    Mutant(
        "the reference is the trained policy where a run is resumed",
        "dpo",
        "    if last_step <= 0:\n        device, found",
        "    if last_step >= -1:\n        device, found",
        "test_preference_runs.py::test_resumed_dpo_reads_its_reference_from_the_run_folder",
    ),
    Mutant(
        "pairs have the reference of other pairs",
        "dpo",
        'found[:, [own[i] for i in part["rows"].tolist()]]',
        'found[:, own[: len(part["rows"])]]',
        "test_preferences.py::test_references_are_sums_of_token_logprobs",
    ),
    Mutant(
        "chosen and rejected are swapped in the data",
        "dpo reward_model",
        '"chosen_ids": chosen_ids, "rejected_ids": rejected_ids}',
        '"chosen_ids": rejected_ids, "rejected_ids": chosen_ids}',
        "test_pairs.py::test_every_form_is_encoded_with_the_chat_template_and_a_stop_token",
    ),
    Mutant(
        "completions of pairs have no stop token",
        "dpo reward_model",
        "(ids if ids[-1:] == [stop_id] else [*ids, stop_id] for ids in encoded)",
        "(ids for ids in encoded)",
        "test_pairs.py::test_every_completion_ends_in_one_stop_token",
    ),
    Mutant(
        "completions of pairs begin with a BOS token",
        "dpo reward_model",
        'tokenizer(text, add_special_tokens=False)["input_ids"] for text in completions',
        'tokenizer(text)["input_ids"] for text in completions',
        "test_pairs.py::test_only_the_prompt_begins_with_a_bos_token",
    ),
    Mutant(
        "the reward model prefers the rejected completion",
        "reward_model",
        "margins = chosen_scores - rejected_scores",
        "margins = rejected_scores - chosen_scores",
        "test_preferences.py::test_reward_model_loss_by_hand",
    ),
    Mutant(
        "the score is read one token before the stop token",
        "reward_model ppo_rlhf",
        "last = hidden[torch.arange(len(hidden), device=hidden.device), lengths - 1]",
        "last = hidden[torch.arange(len(hidden), device=hidden.device), lengths - 2]",
        "test_preferences.py::test_the_score_is_read_at_the_stop_token_by_us_and_by_hugging_face",
    ),
    Mutant(
        "the score is read in the last column, padding or not",
        "reward_model ppo_rlhf",
        "last = hidden[torch.arange(len(hidden), device=hidden.device), lengths - 1]",
        "last = hidden[:, -1]",
        "test_preferences.py::test_scores_do_not_depend_on_padding",
    ),
    Mutant(
        "the padding token of a reward model is its stop token",
        "reward_model ppo_rlhf",
        "if tokenizer.pad_token_id is None or tokenizer.pad_token_id in stop_ids:",
        "if tokenizer.pad_token_id is None:",
        "test_preferences.py::test_the_score_is_read_at_the_stop_token_by_us_and_by_hugging_face",
    ),
    Mutant(
        "the head of a reward model is made anew when it is loaded",
        "reward_model ppo_rlhf",
        'if "score.weight" in missing:\n        nn.init',
        "if model.config.architectures:\n        nn.init",
        "test_preference_runs.py::test_the_embedded_reward_model_tells_held_out_pairs_apart",
    ),
    # ---- SFT
    Mutant(
        "SFT trains the prompt",
        "sft",
        "trained += [not is_prompt and k <= stop for k in range(len(turn))]",
        "trained += [k <= stop for k in range(len(turn))]",
        "test_sft.py::test_prompt_and_completion_train_the_completion_and_its_stop_token",
    ),
    Mutant(
        "SFT trains the turns of the user between those of the assistant",
        "sft",
        'completion_loss(logprobs, part["loss_mask"])',
        'completion_loss(logprobs, part["completion_mask"])',
        "test_sft.py::test_loss_and_gradient_are_those_of_the_trained_tokens_alone",
    ),
    Mutant(
        "SFT leaves out the stop token",
        "sft",
        "trained += [not is_prompt and k <= stop for k in range(len(turn))]",
        "trained += [not is_prompt and k < stop for k in range(len(turn))]",
        "test_sft.py::test_prompt_and_completion_train_the_completion_and_its_stop_token",
    ),
    Mutant(
        "SFT trains what a template writes after the stop token",
        "sft",
        "trained += [not is_prompt and k <= stop for k in range(len(turn))]",
        "trained += [not is_prompt for k in range(len(turn))]",
        "test_sft.py::test_what_a_template_writes_after_the_stop_token_is_not_trained",
    ),
    Mutant(
        "SFT gives each row the same weight, whatever its length",
        "sft",
        "loss = -torch.where(loss_mask.bool(), logprobs, 0.0).sum()",
        "loss = -(torch.where(loss_mask.bool(), logprobs, 0.0).sum(1) / loss_mask.sum(1).clamp(min=1)).sum()",
        "test_sft.py::test_loss_and_gradient_are_those_of_the_trained_tokens_alone",
    ),
    Mutant(
        "SFT divides by all tokens",
        "sft",
        'divisor = sum(sum(row["trained"]) for row in picked)',
        'divisor = sum(len(row["ids"]) for row in picked)',
        f"{STEPS}rows_without_gradient_count_in_the_divisor",
    ),
]

# ---- what a run is, what it is given, what it says
MUTANTS += [
    Mutant(
        "a resumed run may read other data",
        ALL,
        'for key in ("script", "processes", "data"):',
        'for key in ("script", "processes"):',
        ["test_runs.py::test_other_data_is_refused", "test_runs.py::test_an_edited_file_of_pairs_is_refused"],
    ),
    Mutant(
        "a changed reward is not told on resume",
        ALL,
        'print(f"warning: not what it was',
        'str(f"warning: not what it was',
        "test_runs.py::test_a_changed_function_is_one_line",
    ),
    Mutant(
        "two processes write into one folder",
        ALL,
        "fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        "test_runs.py::test_a_second_process_on_one_folder_is_refused",
    ),
    Mutant(
        "a run without a state is resumed from step 0",
        ALL,
        '        if not steps:\n            raise SystemExit(f"--resume',
        '        if steps is None:\n            raise SystemExit(f"--resume',
        "test_runs.py::test_without_a_state_there_is_nothing_to_go_on_from",
    ),
    Mutant(
        "a reward of nan is trained on",
        SAMPLED,
        'not hasattr(reward, "__float__") or not abs(reward) < 1e38',
        'not hasattr(reward, "__float__") or abs(reward) >= 1e38',
        "test_own_rewards.py::test_a_reward_that_is_no_finite_number_stops_and_shows_the_completion",
    ),
    Mutant(
        "parameters that a folder lacks are random",
        ALL,
        'faults = [f"it lacks {key}" for key in sorted(info["missing_keys"]) if not key.startswith("score.")]',
        "faults = []",
        "test_models.py::test_a_folder_with_something_wrong_is_one_line",
    ),
    Mutant(
        "weights that are not finite are trained",
        ALL,
        "if not value.isfinite().all()]",
        "if value is None]",
        "test_models.py::test_a_folder_with_something_wrong_is_one_line",
    ),
    Mutant(
        "the end of a turn is the tokenizer's eos, whatever the template writes",
        ALL,
        "return ends[0] if ends else tokenizer.eos_token_id",
        "return tokenizer.eos_token_id",
        "test_models.py::test_what_ends_a_turn_is_sampled_trained_compared_and_saved",
    ),
    Mutant(
        "checkpoints name one stop token only",
        LOGPROBS,
        "model.generation_config.eos_token_id = stop_ids",
        "model.generation_config.eos_token_id = tokenizer.eos_token_id",
        "test_models.py::test_what_ends_a_turn_is_sampled_trained_compared_and_saved",
    ),
    Mutant(
        "the sampler's buffers are rounded to bfloat16",
        SAMPLED,
        "        cast_blocks(sampler)\n",
        "        cast_blocks(sampler)\n        [value.copy_(value.bfloat16()) for value in sampler.buffers()]\n",
        f"{PRECISION}the_sampler_computes_as_the_policy_does",
    ),
    Mutant(
        "a truncated completion is worth 0 where wrong ones cost",
        "dr_grpo",
        ".amin(1).clamp(max=0).repeat_interleave(group_size)",
        ".amin(1).mul(0).repeat_interleave(group_size)",
        "test_own_rewards.py::test_a_truncated_completion_gets_the_lowest_reward_of_its_group_and_at_most_0",
    ),
    Mutant(
        "nothing to learn from is not said",
        ONLINE,
        "if len(stuck) == 6 and all(stuck[1:]) and not stuck[0]:",
        "if False:",
        "test_own_rewards.py::test_steps_without_anything_to_learn_from_are_told_once_with_the_reason",
    ),
    Mutant(
        "what a full disk left over stays there",
        ALL,
        "            shutil.rmtree(unfinished, ignore_errors=True)\n            shutil.rmtree(Path(run_dir)",
        "            shutil.rmtree(Path(run_dir)",
        "test_runs.py::test_a_save_that_finds_no_room_is_one_line_and_leaves_the_last_state",
    ),
]

# ---- what the sampler rounds, and the weights that make up for it
MUTANTS += [
    Mutant(
        "the weight is the sampler's probability over the policy's",
        WEIGHTED,
        "log_weight = torch.where(mask, ",
        "log_weight = -torch.where(mask, ",
        [*each(OF_ONE_TOKEN, WEIGHTED), *each(OF_COMPLETIONS, WEIGHTED)],
    ),
    Mutant(
        "the weight is not capped",
        WEIGHTED,
        ".clamp(max=sampler_weight_cap)",
        ".clamp(max=1e9)",
        each(CAPPED, WEIGHTED),
    ),
    Mutant(
        "the weight is at least 1, too",
        WEIGHTED,
        ".clamp(max=sampler_weight_cap)",
        ".clamp(1.0, sampler_weight_cap)",
        each(CAPPED, WEIGHTED),
    ),
    Mutant(
        "the KL term is not weighted",
        "grpo",
        "kl = (weight * token_kl",
        "kl = (token_kl",
        each(OF_ONE_TOKEN, "grpo"),
    ),
    Mutant(
        "GSPO's weight is the product over tokens",
        "gspo",
        "(log_weight.sum(1) / lengths).exp()",
        "log_weight.sum(1).exp()",
        [*each(OF_COMPLETIONS, "gspo"), *each(CAPPED, "gspo")],
    ),
    Mutant(
        "a gradient flows through REINFORCE's weight",
        "reinforce",
        "logprobs.detach() - sampler_logprobs",
        "logprobs - sampler_logprobs",
        [*each(OF_ONE_TOKEN, "reinforce"), *each(OF_COMPLETIONS, "reinforce")],
    ),
    Mutant(
        "policy/sampler_kl is of the other direction",
        WEIGHTED,
        "(log_weight.expm1() - log_weight).sum()",
        "(torch.expm1(-log_weight) + log_weight).sum()",
        each(CAPPED, WEIGHTED),
    ),
    Mutant(
        "policy/sampler_kl is the mean weight less 1",
        WEIGHTED,
        "(log_weight.expm1() - log_weight).sum()",
        "log_weight.expm1().sum()",
        each(CAPPED, WEIGHTED),
    ),
    Mutant(
        "the sampler's log-probabilities do not reach the loss",
        f"{ONLINE} ppo_rlhf",
        'part.get("sampler_logprobs"),',
        'part.get("no such"),',
        [*each(ACCUMULATED, ONLINE), "test_ppo.py::test_accumulated_gradient_is_that_of_both_losses"],
    ),
    Mutant(
        "the sampler's log-probabilities are at temperature 1",
        SAMPLED,
        "probabilities.gather(1, tokens.unsqueeze(1)).squeeze(1).log()",
        "logits.float().log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)",
        each(SAMPLER_LOGPROBS, "0.7"),
    ),
    Mutant(
        "the sampler's log-probabilities go to the first rows once others have left the batch",
        SAMPLED,
        "completion_ids[rows, t], sampler_logprobs[rows, t] = tokens, logprobs",
        "completion_ids[rows, t], sampler_logprobs[: len(rows), t] = tokens, logprobs",
        SAMPLER_LOGPROBS,
    ),
    Mutant(
        "a group goes on from another prompt's keys and values",
        SAMPLED,
        "select_rows(cache, row_of)",
        "select_rows(cache, row_of.flip(0))",
        "test_rollouts.py::test_a_padded_batch_decodes_like_single_rows",
    ),
    Mutant(
        "a scale of logits is left out",
        LOGPROBS,
        "logits = logits if scale == 1 else logits * scale",
        "logits = logits",
        "test_logprobs.py::test_logits_are_scaled_and_capped_before_the_temperature/scale",
    ),
]

# ---- precision, sharding, adapters, memory
MUTANTS += [
    Mutant(
        "the sampler's LM head is in bfloat16, the policy's is not",
        SAMPLED,
        'if precision == "bfloat16" and weight in inside else',
        'if precision == "bfloat16" else',
        f"{PRECISION}the_sampler_computes_as_the_policy_does",
    ),
    Mutant(
        "the last block's output stays in bfloat16 in the policy",
        ALL,
        "MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)",
        "MixedPrecisionPolicy(torch.bfloat16, torch.float32)",
        TO_THE_LAST_BIT,
    ),
    Mutant(
        "gradients of ranks are added in bfloat16",
        ALL,
        "MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)",
        "MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)",
        f"{PRECISION}ranks_add_their_gradients_in_float32",
    ),
    Mutant(
        "what is outside the blocks stays gathered after a forward pass",
        ALL,
        "fully_shard(policy, mesh=mesh, reshard_after_forward=True)",
        "fully_shard(policy, mesh=mesh, reshard_after_forward=False)",
        f"{PRECISION}nothing_stays_gathered_after_a_forward_pass_without_gradient",
    ),
    Mutant(
        "a model with one frozen weight counts as frozen",
        ALL,
        "return any(weight.requires_grad and not name.endswith(ADAPTERS)",
        "return all(weight.requires_grad and not name.endswith(ADAPTERS)",
        f"{PRECISION}a_model_with_a_frozen_weight_is_trained",
    ),
    Mutant(
        "blocks within blocks count, too",
        ALL,
        "return [block for block in found if block not in inner]",
        "return found",
        f"{PRECISION}blocks_are_not_within_one_another",
    ),
    Mutant(
        "the sampler gets the frozen parameters only",
        SAMPLED,
        "if trained.requires_grad:",
        "if not trained.requires_grad:",
        f"{PRECISION}the_sampler_gets_what_was_trained",
    ),
    Mutant(
        "a resumed run's reference is the checkpoint",
        WEIGHTED,
        "    model, _ = load_model(args.model, tokenizer)\n",
        '    model, _ = load_model(f"{args.resume}/checkpoint" if args.resume else args.model, tokenizer)\n',
        each(f"{PRECISION}a_resumed_run_equals_an_uninterrupted_one", "bfloat16"),
    ),
    Mutant(
        "adapters are merged without alpha / rank",
        ALL,
        "b @ a * (LORA_ALPHA / len(a))",
        "b @ a",
        f"{LORA}checkpoints_are_ordinary_folders_of_one_dtype",
    ),
    Mutant(
        "saving adds the adapters to the frozen weight",
        ALL,
        "own[weight] = own[weight] + b @ a",
        "own[weight] += b @ a",
        each(f"{LORA}checkpoints_are_ordinary_folders_of_one_dtype", "float32"),
    ),
    Mutant(
        "adapters count in the reference",
        WEIGHTED,
        "        LoRALinear.enabled = False\n",
        "        LoRALinear.enabled = True\n",
        f"{LORA}the_reference_is_the_model_without_adapters_to_the_last_bit",
    ),
    Mutant(
        "adapters stay off after the reference",
        WEIGHTED,
        "        LoRALinear.enabled = True\n",
        "",
        f"{LORA}the_reference_is_the_model_without_adapters_to_the_last_bit",
    ),
    Mutant(
        "gradients are zeroed, not freed",
        ALL,
        "optimizer.zero_grad()",
        "optimizer.zero_grad(set_to_none=False)",
        f"{LORA}gradients_are_freed_after_each_step",
    ),
    Mutant(
        "the gradient of the LM head is that of the last chunk",
        LOGPROBS,
        "total += gradient",
        "total.copy_(gradient)",
        "test_logprobs.py::test_chunks_of_the_head_equal_all_logits_at_once",
    ),
    Mutant(
        "entropies get no gradient where log-probabilities do",
        LOGPROBS,
        "used = [i for i, gradient in enumerate(gradients) if gradient is not None]",
        "used = [i for i, gradient in enumerate(gradients) if gradient is not None][:1]",
        "test_logprobs.py::test_chunks_of_the_head_equal_all_logits_at_once",
    ),
    Mutant(
        "entropies are 0",
        LOGPROBS,
        "entropies = -(logprobs.exp() * logprobs).sum(-1)",
        "entropies = 0.0 * logprobs.exp().sum(-1)",
        "test_logprobs.py::test_entropies_are_those_of_others",
    ),
]

# ---- CISPO
MUTANTS += [
    Mutant(
        "a gradient flows through CISPO's ratio",
        "cispo",
        "ratio.clamp(max=1 + clip_eps_high).detach()",
        "ratio.clamp(max=1 + clip_eps_high)",
        [CISPO_BY_HAND, CISPO_EXACT],
    ),
    Mutant(
        "CISPO's ratio has no cap",
        "cispo",
        "ratio.clamp(max=1 + clip_eps_high)",
        "ratio",
        [CISPO_BY_HAND, CISPO_EXACT],
    ),
    Mutant(
        "CISPO's ratio has a bound below, too",
        "cispo",
        "ratio.clamp(max=1 + clip_eps_high)",
        "ratio.clamp(1 - clip_eps_high, 1 + clip_eps_high)",
        [CISPO_BY_HAND, CISPO_KEEPS],
    ),
    Mutant(
        "CISPO's cap is epsilon",
        "cispo",
        "ratio.clamp(max=1 + clip_eps_high)",
        "ratio.clamp(max=clip_eps_high)",
        [CISPO_BY_HAND, CISPO_KEEPS],
    ),
    Mutant(
        "CISPO drops the tokens that it caps",
        "cispo",
        "clipped_ratio * advantages * logprobs",
        "clipped_ratio * (ratio <= 1 + clip_eps_high) * advantages * logprobs",
        [CISPO_BY_HAND, CISPO_KEEPS],
    ),
    Mutant(
        "CISPO's objective is GRPO's",
        "cispo",
        "clipped_ratio * advantages * logprobs",
        "torch.min(ratio * advantages, ratio.clamp(max=1 + clip_eps_high) * advantages)",
        [CISPO_BY_HAND, CISPO_KEEPS],
    ),
    Mutant(
        "CISPO caps the product of its ratio and the sampler's weight",
        "cispo",
        "token_loss = -weight * clipped_ratio *",
        "token_loss = -(weight * ratio).clamp(max=1 + clip_eps_high).detach() *",
        f"{CAPPED}/cispo",
    ),
    Mutant(
        "CISPO has a mean per completion",
        "cispo",
        "torch.where(mask, token_loss, 0.0).sum()",
        "(torch.where(mask, token_loss, 0.0).sum(1) / mask.sum(1).clamp(min=1)).sum()",
        [CISPO_BY_HAND, CISPO_EXACT],
    ),
    Mutant(
        "CISPO divides by completions",
        "cispo",
        'max(1, all_reduce(batch["completion_mask"][rows].sum()))',
        "args.minibatch_size",
        f"{STEPS}rows_without_gradient_count_in_the_divisor/cispo",
    ),
    Mutant(
        "CISPO divides by the tokens of rows that have an advantage",
        "cispo",
        'all_reduce(batch["completion_mask"][rows].sum())',
        'all_reduce(batch["completion_mask"][rows[live[rows]]].sum())',
        f"{STEPS}rows_without_gradient_count_in_the_divisor/cispo",
    ),
    Mutant(
        "CISPO divides by the tokens of one rank",
        "cispo",
        'all_reduce(batch["completion_mask"][rows].sum())',
        'float(batch["completion_mask"][rows].sum())',
        "test_randomness.py::test_ranks_divide_by_one_number/cispo",
    ),
]

# ---- tools that the policy calls

TOOLS = "test_tools.py::"
MUTANTS += [
    Mutant(
        "what the tool wrote is trained",
        "grpo_tools",
        'part["action_mask"],\n            args.clip_eps',
        'part["completion_mask"],\n            args.clip_eps',
        f"{TOOLS}test_tokens_of_the_tool_have_no_part_in_loss_gradient_or_metrics",
    ),
    Mutant(
        "what the tool wrote counts in the entropy",
        "grpo_tools",
        '(entropies * part["action_mask"]).sum()',
        "entropies.sum()",
        f"{TOOLS}test_tokens_of_the_tool_have_no_part_in_loss_gradient_or_metrics",
    ),
    Mutant(
        "what the tool wrote passes for drawn",
        "grpo_tools",
        "replies[row].pop(0), -math.inf, False",
        "replies[row].pop(0), logprobs[i], False",
        f"{TOOLS}test_several_calls_a_completion_and_what_they_leave",
    ),
    Mutant(
        "a stop token ends a completion although the user answers",
        "grpo_tools",
        "ended[i] = ended[i] and not replies[row]",
        "pass",
        f"{TOOLS}test_a_reply_to_a_stop_token_begins_another_turn",
    ),
    Mutant(
        "a draw that is written over ends a completion",
        "grpo_tools",
        "replies[row].pop(0), -math.inf, False",
        "replies[row].pop(0), -math.inf, ended[i]",
        f"{TOOLS}test_what_is_drawn_where_a_reply_is_written_is_thrown_away",
    ),
    Mutant(
        "the tool is given the whole completion, again and again",
        "grpo_tools",
        "[*windows[row], tokens[i]][-args.tool_tokens :]",
        "[*windows[row], tokens[i]]",
        f"{TOOLS}test_endless_replies_are_cut",
    ),
    Mutant(
        "evaluations have no tool",
        "grpo_tools",
        "make_writer and make_writer(len(ids), tokenizer, args)",
        "temperature and make_writer(len(ids), tokenizer, args) or None",
        f"{TOOLS}test_how_often_the_tool_was_used_by_hand",
    ),
]


# ---- process supervision
MUTANTS += [
    Mutant(
        "a token has the rewards of the steps that ended before it",
        "grpo_process",
        "advantages[row, :tokens] += reward",
        "advantages[row, tokens:] += reward",
        [f"{PROCESS}advantages_by_hand", OF_STEPS],
    ),
    Mutant(
        "all tokens have the reward of the last step alone",
        "grpo_process",
        "advantages[row, :tokens] += reward",
        "advantages[row, :tokens] = reward",
        [f"{PROCESS}advantages_by_hand", OF_STEPS],
    ),
    Mutant(
        "the token that ends a step has not its reward",
        "grpo_process",
        "advantages[row, :tokens] += reward",
        "advantages[row, : tokens - 1] += reward",
        [f"{PROCESS}advantages_by_hand", OF_STEPS],
    ),
    Mutant(
        "the steps of each completion are normalised by themselves",
        "grpo_process",
        "for first in range(0, len(steps), group_size):",
        "for first, group_size in zip(range(len(steps)), [1] * len(steps)):",
        [f"{PROCESS}advantages_by_hand", f"{PROCESS}one_step_a_completion_is_the_advantage_of_grpo"],
    ),
    Mutant(
        "step rewards are summed before they are normalised",
        "grpo_process",
        "        normalised = ",
        "        to_come = [sum(r for i, t, r in group if i == j and t >= u) for j, u, _ in group]\n"
        "        rewards = torch.tensor(to_come, dtype=torch.float32)\n"
        "        normalised = ",
        [f"{PROCESS}advantages_by_hand", OF_STEPS],
    ),
    Mutant(
        "equal step rewards have advantages by rounding",
        "grpo_process",
        "torch.where((rewards == rewards[0]).all(), 0.0, normalised)",
        "normalised",
        each(f"{PROCESS}equal_step_rewards_have_advantage_exactly_0", "0.1"),
    ),
    Mutant(
        "step rewards are centred, not divided",
        "grpo_process",
        "(rewards - rewards.mean()) / (rewards.std() + 1e-4)",
        "(rewards - rewards.mean())",
        f"{PROCESS}advantages_by_hand",
    ),
    Mutant(
        "a step ends one token late",
        "grpo_process",
        "bisect.bisect_left(range(len(ids)), end",
        "bisect.bisect_right(range(len(ids)), end",
        f"{PROCESS}a_step_ends_at_the_token_that_writes_its_last_character",
    ),
    Mutant(
        "a part of a character counts as the character",
        "grpo_process",
        "len(os.path.commonprefix([tokenizer.decode(ids[:tokens], skip_special_tokens=True), completion]))",
        "len(tokenizer.decode(ids[:tokens], skip_special_tokens=True))",
        f"{PROCESS}a_step_ends_at_the_token_that_writes_its_last_character",
    ),
    Mutant(
        "the final answer ends before the stop token",
        "grpo_process",
        "(math.inf, reward)]",
        "(len(completion), reward)]",
        f"{PROCESS}a_step_ends_at_the_token_that_writes_its_last_character",
    ),
    Mutant(
        "the final answer is no step",
        "grpo_process",
        "steps = [*step_rewards(completion, row), (math.inf, reward)]",
        "steps = [*step_rewards(completion, row), *[(math.inf, reward)][len(completion) :]]",
        f"{PROCESS}a_step_ends_at_the_token_that_writes_its_last_character",
    ),
    Mutant(
        "a step reward of nan is trained on",
        "grpo_process",
        "if not (step[0] > 0 and abs(step[1]) < 1e38)]",
        "if step[1] is None]",
        f"{PROCESS}a_step_without_place_or_reward_is_one_line",
    ),
    Mutant(
        "the prompts of a rollout are shifted against its steps",
        "grpo_process",
        "asked = [prompt for prompt in prompts for _ in range(args.group_size)]",
        "asked = prompts * args.group_size",
        f"{PROCESS}main_gives_each_token_the_rewards_of_the_steps_to_come",
    ),
    Mutant(
        "completions live by their outcome, whatever their steps are worth",
        "grpo_process",
        'live = (batch["advantages"] != 0).any(1)',
        'live = (compute_advantages([s[-1:] for s in steps], args.group_size, batch["completion_mask"]) != 0).any(1)',
        f"{PROCESS}groups_of_equal_steps_cost_no_pass",
    ),
    Mutant(
        "rollout/live counts tokens",
        "grpo_process",
        'totals |= rollout_metrics(batch | {"advantages": batch["advantages"].any(1)}, args.group_size)',
        "totals |= rollout_metrics(batch, args.group_size)",
        f"{PROCESS}groups_of_equal_steps_cost_no_pass",
    ),
]

# ---- the pretraining loss of PPO-ptx
MUTANTS += [
    Mutant(
        "PPO-ptx makes texts less likely",
        "ppo_rlhf",
        '        loss = -torch.where(part["loss_mask"], logprobs, 0.0).sum()\n        (loss * (args.ptx_coef',
        '        loss = torch.where(part["loss_mask"], logprobs, 0.0).sum()\n        (loss * (args.ptx_coef',
        f"{PTX}gradient_is_that_of_the_plain_log_likelihood_of_the_trained_tokens",
    ),
    Mutant(
        "PPO-ptx is of another temperature",
        "ppo_rlhf",
        "policy(*inputs, 1.0)",
        "policy(*inputs, args.temperature)",
        f"{PTX}gradient_is_that_of_the_plain_log_likelihood_of_the_trained_tokens",
    ),
    Mutant(
        "PPO-ptx trains the user's turns",
        "ppo_rlhf",
        'torch.where(part["loss_mask"], logprobs, 0.0).sum()',
        'torch.where(part["completion_mask"].bool(), logprobs, 0.0).sum()',
        f"{PTX}gradient_is_that_of_the_plain_log_likelihood_of_the_trained_tokens",
    ),
    Mutant(
        "each microbatch of PPO-ptx has its own mean",
        "ppo_rlhf",
        "(loss * (args.ptx_coef * world_size / num_tokens)).backward()",
        '(loss * (args.ptx_coef * world_size / part["loss_mask"].sum().clamp(min=1))).backward()',
        f"{PTX}microbatches_change_neither_gradient_nor_mean",
    ),
    Mutant(
        "PPO-ptx is divided by the tokens of each rank",
        "ppo_rlhf",
        'total, num_tokens = 0.0, all_reduce(batch["loss_mask"].sum())',
        'total, num_tokens = 0.0, float(batch["loss_mask"].sum())',
        each("test_preferences.py::test_two_ranks_have_the_gradient_and_metrics_of_one", "ppo_rlhf"),
    ),
    Mutant(
        "PPO-ptx without its coefficient",
        "ppo_rlhf",
        "(args.ptx_coef * world_size / num_tokens)",
        "(world_size / num_tokens)",
        f"{PTX}gradient_is_that_of_the_plain_log_likelihood_of_the_trained_tokens",
    ),
    Mutant(
        "PPO-ptx has the same texts in every optimizer step of a rollout",
        "ppo_rlhf",
        "first = (optimizer_step - 1) * args.minibatch_size",
        "first = (step - 1) * args.minibatch_size",
        f"{PTX}every_optimizer_step_has_as_many_texts_as_completions",
    ),
    Mutant(
        "texts are read though nothing asks for them",
        "ppo_rlhf",
        'load_texts(args, tokenizer) if args.ptx_coef else ([], "")',
        "load_texts(args, tokenizer)",
        f"{PTX}without_it_no_text_is_read",
    ),
    Mutant(
        "texts that are too long are trained whole",
        "ppo_rlhf",
        "[: 1 + args.max_completion_length]",
        "[: 9 + args.max_completion_length]",
        f"{PTX}rows_with_text_or_as_in_sft",
    ),
]

# ---- the tool


def copy_repository(folder):
    """Make a copy of what tests need, with links to what none of them changes."""
    for path in (*ROOT.glob("*.py"), ROOT / "pyproject.toml"):
        shutil.copy(path, folder)
    for name in ("tests", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("models", "data"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "temporary").mkdir()


def with_bug(mutant, folder):
    """Return {path: text} of the scripts with the bug; a row that does not fit them is an error."""
    texts = {}
    for path in (folder / f"{script}.py" for script in mutant.scripts.split()):
        text = path.read_text(encoding="utf-8")
        if text.count(mutant.old) != 1:
            raise SystemExit(f"{mutant.name}: {path.name} has {text.count(mutant.old)} times, not once:\n{mutant.old}")
        texts[path] = text.replace(mutant.old, mutant.new)
        compile(texts[path], path.name, "exec")
    return texts


def tests_of(mutant):
    return [mutant.tests] if isinstance(mutant.tests, str) else mutant.tests


def run_tests(folder, tests, seconds):
    """Return pytest's exit status, None if it took longer than these seconds, and its output."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += dict.fromkeys(f"tests/{test.partition('/')[0]}" for test in tests)
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1", "COLUMNS": "300"}
    environment |= dict.fromkeys(("TMPDIR", "HF_DATASETS_CACHE"), str(folder / "temporary"))
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # to end what torchrun started, too
    )
    try:
        output, _ = process.communicate(timeout=seconds)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return None, process.communicate()[0]


def failure_of(test, output):
    """The line of pytest's summary that says that this test failed, in this case if one is named; else None."""
    node, _, case = test.partition("/")
    for line in re.findall(r"^FAILED tests/(.*)", output, re.MULTILINE):
        failed, _, error = line.partition(" - ")
        name, _, cases = failed.partition("[")
        if node in (name, failed) and (not case or case in cases.removesuffix("]").split("-")):
            return None if BROKEN.match(error) else line
    return None


def try_mutant(mutant, copy):
    """Return (mutant, verdict, seconds)."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(shutil.copytree(copy, folder, symlinks=True, dirs_exist_ok=True))
        for path, text in with_bug(mutant, folder).items():
            path.write_text(text, encoding="utf-8")
        status, output = run_tests(folder, tests_of(mutant), SECONDS)
    missed = [test for test in tests_of(mutant) if not failure_of(test, output)]
    # Status 1 is failed tests; others are errors of collection, no tests, or no end.
    verdict = "caught" if status == 1 and not missed else f"SURVIVED, pytest's exit status {status}"
    seconds = time.perf_counter() - start
    print(f"{seconds:4.0f} s  {verdict}: {mutant.name}", flush=True)
    if verdict != "caught":
        print("\n".join([*output.splitlines()[-25:], *(f"no failure: {test}" for test in missed)]), flush=True)
    return mutant, verdict, seconds


def write_result(results):
    """Write the table; the rows of bugs that were not planted this time stay as they are."""
    lines = RESULT.read_text(encoding="utf-8").splitlines() if RESULT.exists() else []
    rows = {line.split(" | ")[0]: line for line in lines if line.startswith("| ")}
    for mutant, verdict, seconds in results:
        scripts = "all" if mutant.scripts == ALL else mutant.scripts.replace(" ", ", ")
        tests = "<br>".join(dict.fromkeys(f"`{test.partition('/')[0]}`" for test in tests_of(mutant)))
        rows[f"| {mutant.name}"] = f"| {mutant.name} | {scripts} | {verdict} | {tests} | {seconds:.0f} |"
    rows = [rows[f"| {mutant.name}"] for mutant in MUTANTS if f"| {mutant.name}" in rows]
    num_caught = sum(" | caught | " in row for row in rows)
    minutes = sum(int(row.split(" | ")[-1].removesuffix(" |")) for row in rows) / 60
    lines = ["# Known bugs, planted one at a time", ""]
    lines += [f"`python tests/mutants.py`: {num_caught} of {len(rows)} caught. Every test that is named must fail."]
    machine = f"{os.cpu_count()} {platform.machine()} cores"
    lines += [f"{time.strftime('%Y-%m-%d')}, {machine}, {minutes:.0f} minutes one after the other.", ""]
    lines += ["| bug | planted in | | by | seconds |", "|---|---|---|---|---|", *rows]
    RESULT.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description="Plant known bugs, one at a time, and see that a test fails.")
    parser.add_argument("words", nargs="*", help="plant only bugs whose name has one of these in it")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    args = parser.parse_args()
    chosen = [m for m in MUTANTS if not args.words or any(word in m.name for word in args.words)]
    if not chosen or len({mutant.name for mutant in MUTANTS}) < len(MUTANTS):
        raise SystemExit("no bug of that name, or two of one name")
    with tempfile.TemporaryDirectory() as copy, tempfile.TemporaryDirectory() as clean:
        copy_repository(Path(copy))  # once: nobody's edits come in between
        for mutant in chosen:
            with_bug(mutant, Path(copy))
        shutil.copytree(copy, clean, symlinks=True, dirs_exist_ok=True)
        tests = sorted(test for mutant in chosen for test in tests_of(mutant))
        status, output = run_tests(Path(clean), tests, SECONDS * 6)
        if status != 0:
            raise SystemExit(f"{output[-3000:]}\nwithout any bug the tests must pass")
        print(f"without any bug: {output.splitlines()[-1]}", flush=True)
        with ThreadPoolExecutor(args.jobs) as pool:
            results = list(pool.map(try_mutant, chosen, [copy] * len(chosen)))
    write_result(results)
    survivors = [mutant.name for mutant, verdict, _ in results if verdict != "caught"]
    print(f"{len(results) - len(survivors)} of {len(results)} caught", *survivors, sep="\n")
    raise SystemExit(bool(survivors))


if __name__ == "__main__":
    main()
