r"""GRPO on one device, in 150 lines: read this file first, and then grpo.py, which has the same objective.

Shao et al., "DeepSeekMath" (2024), https://arxiv.org/abs/2402.03300v3, equations 3 and 4:

    J(θ) = E_q 1/G Σᵢ 1/|oᵢ| Σₜ { min(rᵢₜ Aᵢ, clip(rᵢₜ, 1 − ε, 1 + ε) Aᵢ) − β k3ᵢₜ }

    q, oᵢ     prompt, and the i-th of its G completions; |oᵢ| counts its tokens, the stop token included
    rᵢₜ       π_θ(oᵢₜ) / π_old(oᵢₜ); π_old is the policy that sampled, before the step's first update
    Aᵢ        (Rᵢ − mean R) / (std R + 0.0001) over the group, the same for every token of a completion
    k3ᵢₜ      ρ − log ρ − 1 with ρ = π_ref(oᵢₜ) / π_θ(oᵢₜ); π_ref is the model that training started from

Not in the paper: 0.0001 above, AdamW's betas, the limit 1 for the norm of gradients, two updates per rollout.
Use grpo.py if you need several GPUs, long completions, bfloat16, chats as prompts, answers compared as numbers, logs,
checkpoints or resuming. It also makes no update if all rewards are equal; here, AdamW goes on in its last direction.

In the repository's folder (the first takes half a minute on a CPU; the second one has not been run yet):

    python examples/short_grpo.py    # a bundled model learns to add numbers
    python examples/short_grpo.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset openai/gsm8k:main --microbatch-size 4 \
        --num-steps 200 --learning-rate 1e-6 --max-completion-length 512 --instruction " Put the answer in \boxed{}."
"""

import copy
import re
from dataclasses import dataclass

import torch
import tyro
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache


@dataclass
class Args:
    model: str = "models/tiny"  # folder or Hugging Face name of a chat model
    dataset: str = "data/addition"  # folder or hub name; splits train and test, columns prompt (question) and answer
    instruction: str = ""  # text to add to every prompt
    num_steps: int = 20  # training steps, each of which samples completions once
    prompts_per_step: int = 16  # prompts per training step
    group_size: int = 8  # completions per prompt, G in the paper
    max_completion_length: int = 48  # maximum tokens per completion, including the stop token
    temperature: float = 1.0  # temperature of sampling and of log-probabilities
    minibatch_size: int = 64  # completions per optimizer step
    microbatch_size: int = 16  # completions per forward pass
    learning_rate: float = 1.5e-4  # learning rate of AdamW; larger models need a lower one, such as 1e-6
    clip_eps: float = 0.2  # epsilon in eq. 3
    kl_coef: float = 0.04  # beta in eq. 3; with 0 there is no reference model
    seed: int = 1  # seed of sampling and of the choice of prompts


def is_correct(completion, answer):
    r"""Return whether the last \boxed{} of a completion has the text of the answer (what follows ####, if any)."""
    boxes = re.findall(r"\\boxed\{(.*?)\}", completion)
    return len(boxes) > 0 and boxes[-1].strip() == answer.rpartition("####")[2].strip()


def compute_advantages(rewards, group_size):
    """Normalise rewards (B,) within each group (section 4.1.2); exactly 0 where all rewards of a group are equal."""
    groups = rewards.view(-1, group_size)  # (B/G, G), since completions of one prompt are adjacent
    centred = groups - groups.mean(1, keepdim=True)
    equal = (groups == groups[:, :1]).all(1, keepdim=True)
    return torch.where(equal, 0.0, centred / (groups.std(1, keepdim=True) + 1e-4)).view(-1)  # (B,)


def k3(log_ratio):
    """Estimate KL(p || q) from log(q / p) at samples of p (Schulman's k3): unbiased, and never negative."""
    return log_ratio.expm1() - log_ratio  # expm1(x) is exp(x) - 1 without rounding errors near 0


def policy_loss(logprobs, old_logprobs, ref_logprobs, advantages, completion_mask, clip_eps, kl_coef):
    """Return eq. 3 negated and summed over completions; advantages (B,), all else (B, T); ref_logprobs may be None."""
    advantages = advantages.unsqueeze(1)  # (B, 1)
    ratio = torch.where(completion_mask, logprobs - old_logprobs, 0.0).exp()
    clipped_ratio = ratio.clamp(1 - clip_eps, 1 + clip_eps)
    token_loss = -torch.min(ratio * advantages, clipped_ratio * advantages)
    if ref_logprobs is not None:
        token_loss = token_loss + kl_coef * k3(torch.where(completion_mask, ref_logprobs - logprobs, 0.0))
    token_loss = torch.where(completion_mask, token_loss, 0.0)
    return (token_loss.sum(1) / completion_mask.sum(1)).sum()


def compute_logprobs(model, ids, mask, length, temperature):
    """Return log-probabilities (B, T) of completions; ids, mask (B, P + T): prompts, then completions of length T."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)  # the padding before a prompt does not count
    logits = model(ids, attention_mask=mask, position_ids=positions, logits_to_keep=length + 1).logits
    logprobs = (logits[:, :-1] / temperature).log_softmax(-1)  # (B, T, V); output t predicts token t + 1
    return logprobs.gather(2, ids[:, -length:].unsqueeze(2)).squeeze(2)


@torch.no_grad()
def generate(model, tokenizer, rows, temperature, args):
    """Sample a completion of each of B rows; return ids, mask (B, P + T), logprobs (B, T), texts and rewards (B,)."""
    chats = [[{"role": "user", "content": (row.get("prompt") or row["question"]) + args.instruction}] for row in rows]
    batch = tokenizer.apply_chat_template(chats, add_generation_prompt=True, padding=True, return_tensors="pt")
    ids, mask = batch["input_ids"].to(model.device), batch["attention_mask"].to(model.device).bool()  # (B, P)
    stop_ids = torch.tensor(model.generation_config.eos_token_id, device=model.device)
    cache = DynamicCache(config=model.config)  # keys and values of what the model has read
    tokens, logprobs = ids, []  # tokens: what it reads next, first the prompts, then one token of each row
    going = torch.ones_like(mask[:, :1])  # (B, 1): whether the stop token is still to come
    while len(logprobs) < args.max_completion_length and going.any():
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        output = model(tokens, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1)
        distribution = (output.logits[:, -1] / temperature).log_softmax(-1)  # (B, V)
        tokens = distribution.exp().multinomial(1)  # (B, 1)
        logprobs.append(distribution.gather(1, tokens))
        ids = torch.cat([ids, tokens], 1)
        mask = torch.cat([mask, going], 1)  # 1 up to the stop token; what ended rows still sample is masked
        going = going & ~torch.isin(tokens, stop_ids)
    texts = [tokenizer.decode(row[kept]) for row, kept in zip(ids[:, -len(logprobs) :], mask[:, -len(logprobs) :])]
    rewards = [float(is_correct(text, row["answer"])) for text, row in zip(texts, rows)]
    return ids, mask, torch.cat(logprobs, 1), texts, torch.tensor(rewards, device=model.device)


def main(args):
    torch.manual_seed(args.seed)
    train_rows, test_rows = load_dataset(*args.dataset.split(":"), split=["train", "test[:256]"])
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    policy = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()  # without dropout
    ref = copy.deepcopy(policy).requires_grad_(False).to(device) if args.kl_coef else None
    optimizer = torch.optim.AdamW(policy.to(device).parameters(), args.learning_rate, (0.9, 0.95), weight_decay=0.0)
    for step in range(args.num_steps + 1):
        if step % 10 == 0 or step == args.num_steps:
            *_, rewards = generate(policy, tokenizer, test_rows, 0.01, args)  # nearly greedy
            print(f"step {step}: accuracy {rewards.mean():.3f} on {len(rewards)} test prompts")
        if step == args.num_steps:  # this last step only evaluates
            break
        # rollout: sample a group of completions per prompt, score them, and compare each with its group
        picked = torch.randperm(len(train_rows))[: args.prompts_per_step].repeat_interleave(args.group_size)
        rows = train_rows.select(picked)  # a row for each completion
        ids, mask, old_logprobs, texts, rewards = generate(policy, tokenizer, rows, args.temperature, args)
        advantages = compute_advantages(rewards, args.group_size)
        print(f"step {step + 1}: reward {rewards.mean():.3f}, {texts[0]!r}")
        length = old_logprobs.shape[1]
        for indices in torch.randperm(len(rows), device=device).split(args.minibatch_size):  # one optimizer step each
            for part in indices.split(args.microbatch_size):
                logprobs = compute_logprobs(policy, ids[part], mask[part], length, args.temperature)
                ref_logprobs = compute_logprobs(ref, ids[part], mask[part], length, args.temperature) if ref else None
                old = old_logprobs[part]
                kept = mask[part, -length:]  # the tokens of completions, up to the stop token
                loss = policy_loss(logprobs, old, ref_logprobs, advantages[part], kept, args.clip_eps, args.kl_coef)
                (loss / len(indices)).backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main(tyro.cli(Args))
