"""DeLoop on weights: preference training of a LoRA adapter on mined pairs, every objective written out by hand.

One pair goes from JSON to gradient in five functions, which stand in this order:
    encode_pair     pair -> Row: token ids of its prompt and of its two completions (branches), chosen first
    token_logps     Row -> log pi(y_t | x, y_<t) of every completion token; pair_logps sums them over each branch
    pair_losses     log pi and log ref of both sides -> the pair's loss (dpo_loss and its siblings)
    loss_weights    loss -> the two numbers through which it reaches the model, a = dL/dlog pi of either side
    train_step      the sum of a * grad log pi over the optimiser batch -> one step of AdamW

Departures from the document, and what it leaves open (numbered in the README):
    DEV-8   y is the whole assistant message with its end-of-turn token, not the call alone: not stated
    DEV-9   over-long pairs are dropped and counted, never cut; so are pairs whose sides are equal as token ids
    DEV-10  --limit draws by seed from the usable pairs: how 8,000 of 9,403 were drawn is not stated
    DEV-11  AdamW, betas .9 and .999, no weight decay: the optimiser is not stated
    DEV-12  the learning rate rises over the first 10% of the steps, then falls to 0 as a cosine: not stated
    DEV-13  the gradient's norm is clipped at 1: not stated
    DEV-14  ipo, kto, sft and the likelihood anchor, which the document only names, are as their functions say

Files in --out: adapter_model.safetensors and adapter_config.json (PEFT's format), metrics.jsonl (a line a step),
state.json (what ran), references.jsonl (reference log-probs), checkpoint-NNNNNN (adapter, optimiser, state).
The command of a killed run goes on from its last checkpoint, exactly: after the adapter's initial weights nothing draws
random numbers, and batch and learning rate are functions of the step.
"""
from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import hashlib
import json
import math
import os
import random
import resource
import shutil
import sys
import time
import warnings
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import torch
import torch.nn.functional as F
import transformers
from accelerate import Accelerator
from accelerate.utils import gather_object
from peft import LoraConfig, PeftModel, get_peft_model, load_peft_weights, set_peft_model_state_dict
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import deloop
from deloop import InputError, option

OBJECTIVES = ("dpo", "ipo", "kto", "sft", "unlikelihood", "dpo-anchor", "reference-free")
RECIPE = "(document, training recipe)"


@dataclass(frozen=True)
class Config:
    """Every setting of a run; each is a flag of the same name."""
    pairs: str = option("pairs file (deloop-pairs/1), made by: python deloop.py mine")
    model: str = option("base model: a transformers folder or a hub name")
    out: str = option("output folder; a killed run goes on from its last checkpoint")
    objective: str = option("loss; dpo is the document's method", "dpo", choices=OBJECTIVES)
    beta: float = option(f"strength of the pull to the reference; tau of ipo {RECIPE}", 0.05)
    lr: float = option(f"peak learning rate {RECIPE}", 8e-6)
    batch: int = option(f"pairs an optimiser step, by accumulation {RECIPE}", 16)
    epochs: int = option("passes over the pairs (document: 1 for 8B, 2 for 14B and 32B)", 1)
    max_length: int = option(f"most tokens of prompt + completion; a longer pair is dropped {RECIPE}", 4500)
    limit: int = option(f"most pairs used, drawn by seed; 0 = all {RECIPE}", 8000)
    rank: int = option(f"LoRA rank r {RECIPE}", 32)
    alpha: int = option(f"LoRA alpha; the update counts alpha / r times {RECIPE}", 64)
    seed: int = option("seed of the adapter's initial weights, the draw and the order (not stated)", 0)
    schedule: str = option("learning rate after the warm-up (not stated)",
                           "cosine", choices=("cosine", "linear", "constant"))
    warmup: float = option("share of the steps in which the learning rate rises (not stated)", 0.1)
    max_grad_norm: float = option("the gradient is scaled down to this norm; 0 = off (not stated)", 1.0)
    ablate: str = option("gradient term that stays: plus (chosen) or minus (rejected); freeze-g: both, g as at first",
                         "none", choices=("none", "plus", "minus", "freeze-g"))
    suffix_only: bool = option("gradient only through the tokens after the sides' common beginning", False)
    anchor: float = option("weight of the likelihood anchor in dpo-anchor (not stated)", 1.0)
    ipo_average: bool = option("ipo on log-probs averaged over tokens, as in TRL, not summed (not stated)", False)
    impl: str = option("log-probs from one prefix-shared row a pair, or the obvious one row a side (ours)",
                       "prefix", choices=("prefix", "naive"))
    dtype: str = option("of the base; auto = bfloat16 on a GPU, float32 on a CPU; adapter: float32 (not stated)",
                        "auto", choices=("auto", "float32", "bfloat16"))
    gradient_checkpointing: str = option("compute activations twice to save memory; auto = if they would not fit",
                                         "auto", choices=("auto", "on", "off"))
    reference_cache: str = option("file of reference log-probs, for runs one after another; empty = in --out", "")
    log_terms: int = option("every N steps, measure both gradient terms, for four times the step's time; 0 = never", 0)
    save_every: int = option("steps between checkpoints", 50)
    keep: int = option("checkpoints kept", 1)
    plot: bool = option("write curves.svg at the end", False)
    threads: int = option("CPU threads; 0 = torch's choice", 0)


# ---------------------------------------------------------------------------------------------------------------------
# Pairs to rows of token ids

class Row(NamedTuple):
    """One pair as token ids: what the model read and what it might write next."""
    name: str                       # file and line, for messages to people
    prompt: list[int]
    branches: list[list[int]]       # completions, none empty: [chosen, rejected]

    @property
    def common(self) -> int:
        """Number of ids with which all branches begin."""
        differ = (i for i, ids in enumerate(zip(*self.branches)) if len(set(ids)) > 1)
        return next(differ, min(map(len, self.branches)))

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence prompt + completion."""
        return len(self.prompt) + max(map(len, self.branches))

    def digest(self) -> str:
        """Hash of all ids and of where each part begins."""
        parts = (array("q", [len(ids), *ids]).tobytes() for ids in (self.prompt, *self.branches))
        return hashlib.sha256(b"".join(parts)).hexdigest()


def load_rows(config: Config, tokenizer: Any, say: Callable = print) -> tuple[list[Row], Counter]:
    """The rows to train on, and how many pairs met which fate.                                         DEV-9

    A pair over the length is dropped, never cut: a cut takes the newest observation or the completion's end.
    """
    rows, counts = [], Counter()
    for line, pair in deloop.read_jsonl(config.pairs):
        row = encode_pair(pair, tokenizer, f"{config.pairs}, line {line}")
        identical = all(branch == row.branches[0] for branch in row.branches)
        fate = "over-long" if row.longest > config.max_length else "with identical sides" if identical else "usable"
        counts.update(["read", fate])
        if fate == "usable":
            rows.append(row)
        if counts["read"] % 1000 == 0:
            say(f"pairs: {counts['read']} read")
    if not rows:
        raise InputError(f"{config.pairs}: no pairs left to train on: {dict(counts)}, --max-length {config.max_length}")
    if 0 < config.limit < len(rows):                                                                    # DEV-10
        drawn = random.Random(f"limit/{config.seed}").sample(range(len(rows)), config.limit)
        rows = [rows[i] for i in sorted(drawn)]
    counts["used"] = len(rows)
    return rows, counts


def encode_pair(pair: Any, tokenizer: Any, name: str) -> Row:
    """The row of one pair. Raises InputError when the pair is malformed or this tokenizer renders another prompt.

    Only the prompt is rendered, as the harness did, and it must hash to what the harness saw. A template applied to the
    finished chat would add what was never sampled (a newline, an empty think block) and strip what was.
    """
    check_pair(pair, name)
    render = functools.partial(tokenizer.apply_chat_template, **(pair.get("chat_template_kwargs") or {}))
    try:
        prompt = render(pair["prompt"], add_generation_prompt=True, return_dict=False)
        branches = [pair.get(f"{side}_ids") or encode_text(written(pair["prompt"], pair[side][0], render, tokenizer),
                                                           tokenizer) for side in ("chosen", "rejected")]
    except (jinja2.TemplateError, TypeError) as error:
        raise InputError(f"{name}: the chat template of --model refuses the messages ({error})") from None
    if pair.get("prompt_ids_sha256") not in (None, deloop.ids_hash(prompt)):
        raise InputError(f"{name}: template drift: the prompt renders to other tokens than in the rollout. "
                         f"Give the rollout's --model and transformers version, or roll out and mine again")
    if max(map(max, branches)) >= len(tokenizer):
        raise InputError(f"{name}: a sampled id is outside the vocabulary of --model: are these another model's pairs?")
    return Row(name, prompt, branches)


def check_pair(pair: Any, name: str) -> None:
    """Raise InputError unless the pair has the shape of deloop-pairs/1 and its prompt is as it was mined."""
    def is_message(value: Any) -> bool:
        return isinstance(value, dict) and isinstance(value.get("role"), str) and (
            isinstance(value.get("content"), str) or bool(value.get("tool_calls")))

    if not isinstance(pair, dict) or pair.get("format", "deloop-pairs/1") != "deloop-pairs/1":
        raise InputError(f"{name}: no pair of format deloop-pairs/1; make pairs with: python deloop.py mine")
    one = ("one message", 1)
    for key, (number, most) in {"prompt": ("messages", sys.maxsize), "chosen": one, "rejected": one}.items():
        value, ids = pair.get(key), pair.get(f"{key}_ids") or []
        if not (isinstance(value, list) and 0 < len(value) <= most and all(map(is_message, value))):
            raise InputError(f"{name}: {key} must be a list of {number} with role and content (or tool_calls)")
        if not (isinstance(ids, list) and all(type(i) is int and i >= 0 for i in ids)):
            raise InputError(f"{name}: {key}_ids must be a list of token ids or null")
    if pair.get("prompt_sha256") not in (None, deloop.prompt_hash(pair["prompt"])):
        raise InputError(f"{name}: the prompt was edited after it was mined (its prompt_sha256 differs); mine again")


def written(prompt: list[dict], message: dict, render: Callable, tokenizer: Any) -> str:
    """The text of a completion that was not sampled in process: its content; where a foreign log holds tool calls
    instead, what the chat template writes for them behind the prompt, up to the end of the turn."""
    if not message.get("tool_calls"):
        return message["content"]
    before = render(prompt, add_generation_prompt=True, tokenize=False)
    whole = render([*prompt, message], tokenize=False)
    if not whole.startswith(before):
        raise TypeError("it renders a tool call otherwise than behind the prompt")
    text = whole[len(before):].rpartition(tokenizer.convert_ids_to_tokens(end_of_turn(tokenizer)))[0]
    if not all(call.get("function", call)["name"] in text for call in message["tool_calls"]):
        raise TypeError("it does not write tool calls; use a model whose template does")
    return text


def encode_text(content: str, tokenizer: Any) -> list[int]:
    """Ids of a completion that was not sampled in process, closed by exactly one end-of-turn token.     DEV-8

    It is encoded apart from the prompt, so that no merge crosses the border.
    """
    return tokenizer.encode(content, add_special_tokens=False) + [end_of_turn(tokenizer)]


@functools.cache
def end_of_turn(tokenizer: Any) -> int:
    """The token with which the chat template closes an assistant message; eos where it writes none."""
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "deloop"}]
    tail = tokenizer.apply_chat_template(chat, tokenize=False).rpartition("deloop")[2]
    ids = tokenizer.encode(tail, add_special_tokens=False)
    return ids[0] if ids and ids[0] in tokenizer.added_tokens_decoder else tokenizer.eos_token_id


def batch_at(step: int, rows: list[Row], config: Config) -> list[int]:
    """Indices of the rows of optimiser step `step` (from 0): a function of seed and step, so a resume needs no cursor.

    Every epoch has its own order; its last batch may be smaller.
    """
    epoch, window = divmod(step, math.ceil(len(rows) / config.batch))
    order = list(range(len(rows)))
    random.Random(f"order/{config.seed}/{epoch}").shuffle(order)
    return order[window * config.batch:(window + 1) * config.batch]


# ---------------------------------------------------------------------------------------------------------------------
# Log-probs

def pair_logps(model: Any, row: Row, impl: str = "prefix") -> Tensor:
    """log pi(y|x) of every branch y of the row: nats, summed over its tokens in fp32, [branches]."""
    return torch.stack([tokens.sum() for tokens in token_logps(model, row, impl)])


def token_logps(model: Any, row: Row, impl: str = "prefix") -> list[Tensor]:
    """log pi(y_t | x, y_<t) of every token of every branch: one [L] tensor a branch, fp32 (fp64 from an fp64 model).

    "naive" runs the model on [prompt | branch], once a branch. "prefix" runs it once on [prompt | branch | branch ...],
    so the prompt is read once; the model must use the attention "deloop_prefix" (see load_model).
    """
    if impl == "prefix":
        return prefix_logps(model, row)
    found = []
    for branch in row.branches:
        ids = torch.tensor([row.prompt + branch], device=model.device)                              # [1, P + L]
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=len(branch) + 1).logits       # [1, L + 1, V]
        found.append(gather_logps(logits[0, :-1], ids[0, len(row.prompt):]))                        # [L]
    return found


def gather_logps(logits: Tensor, targets: Tensor) -> Tensor:
    """log softmax(logits)[target], [L, V] and [L] -> [L]; in fp32, since bf16 errs by 0.4 nat over 100 tokens."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.gather(-1, targets[:, None])[:, 0] - logits.logsumexp(-1)


def prefix_logps(model: Any, row: Row) -> list[Tensor]:
    """token_logps from one row [prompt | branch | branch ...]: every branch continues the prompt and sees no other.

    Positions restart at the prompt's end in every branch. Logits are made only where a completion token is predicted:
    at the prompt's last position for a branch's first token, then at the branch's own positions but the last.
    """
    start, lengths = len(row.prompt), [len(branch) for branch in row.branches]
    ids, positions, keep = list(row.prompt), list(range(start)), []
    for branch in row.branches:
        keep += [start - 1, *range(len(ids), len(ids) + len(branch) - 1)]
        positions += range(start, start + len(branch))
        ids += branch
    ids, positions, keep = (torch.tensor(each, device=model.device) for each in (ids, positions, keep))
    mask = torch.block_diag(*[torch.ones(n, n, device=model.device).tril() for n in lengths]).bool()    # [S, S]
    mask = torch.cat([mask.new_ones(len(mask), start), mask], 1)                                        # [S, P + S]
    logits = model(input_ids=ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=keep,
                   branch_mask=mask).logits                                                             # [1, S, V]
    return list(gather_logps(logits[0], ids[start:]).split(lengths))


def prefix_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *, scaling: float,
                     dropout: float = 0.0, branch_mask: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, None]:
    """Attention of one row [prompt | branches]: query [1, H, T, d], key and value [1, K, T, d] -> [1, T, H, d].

    Two calls: the P prompt positions are plainly causal, without a mask, so that the flash kernels apply; the S branch
    positions look at everything under the small mask [S, T]. Without branch_mask it is transformers' own sdpa. It is
    registered without a mask function: transformers then builds no mask and does not mistake the restarting positions
    for packed sequences, which would take the prompt away from every branch but the first.
    """
    if branch_mask is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout,
                                      **kwargs)
    heads, start = query.shape[1], query.shape[2] - len(branch_mask)
    attend = functools.partial(F.scaled_dot_product_attention, scale=scaling, dropout_p=dropout)
    prompt = attend(query[:, :, :start], key[:, :, :start], value[:, :, :start], is_causal=True, enable_gqa=True)
    # [1, H, S, d] -> [1, K, G S, d]: the G query heads of one key head lie one after another along the query axis
    folded = query[:, :, start:].reshape(1, key.shape[1], -1, query.shape[3])
    branches = attend(folded, key, value, attn_mask=branch_mask.repeat(heads // key.shape[1], 1))
    return torch.cat([prompt, branches.view(1, heads, -1, query.shape[3])], 2).transpose(1, 2).contiguous(), None


PREFIX_FAMILIES = ("qwen3", "llama")            # their attention passes keyword arguments through and has no window
transformers.AttentionInterface.register("deloop_prefix", prefix_attention)


# ---------------------------------------------------------------------------------------------------------------------
# Objectives: sums of log-probs in, losses out, tensors [B], one entry a pair; the caller reduces.
# plus is the chosen side y+ (the escape), minus the rejected y- (the loop); pi the policy, ref the frozen reference.

def dpo_loss(pi_plus: Tensor, pi_minus: Tensor, ref_plus: Tensor, ref_minus: Tensor, beta: float) -> Tensor:
    """L = -log sigma(z),   z = beta log pi(y+|x)/ref(y+|x) - beta log pi(y-|x)/ref(y-|x)   (document, section DPO)

    dL/dlog pi(y+|x) = -beta g and dL/dlog pi(y-|x) = +beta g, g = sigma(-z)                (document, app. H.3)
    """
    return -F.logsigmoid(margin(pi_plus, pi_minus, ref_plus, ref_minus, beta))


def margin(pi_plus: Tensor, pi_minus: Tensor, ref_plus: Tensor, ref_minus: Tensor, beta: float) -> Tensor:
    """z of dpo_loss; 0 where policy and reference agree."""
    return beta * ((pi_plus - ref_plus) - (pi_minus - ref_minus))


def ipo_loss(pi_plus: Tensor, pi_minus: Tensor, ref_plus: Tensor, ref_minus: Tensor, tau: float,
             n_plus: Tensor | int = 1, n_minus: Tensor | int = 1) -> Tensor:
    """L = (h - 1 / (2 tau))^2,   h = log pi(y+|x)/ref(y+|x) - log pi(y-|x)/ref(y-|x)       (arXiv 2310.12036, eq. 17)

    With the lengths n the log-probs are means over tokens (as in TRL), without them sums (as in DPO's repository).
    """
    return ((pi_plus - ref_plus) / n_plus - (pi_minus - ref_minus) / n_minus - 1 / (2 * tau)) ** 2


def kto_losses(pi_plus: Tensor, pi_minus: Tensor, ref_plus: Tensor, ref_minus: Tensor, beta: float,
               kl: float) -> tuple[Tensor, Tensor]:
    """L+ = 1 - sigma(beta (r+ - kl)),   L- = 1 - sigma(beta (kl - r-)),   r = log pi/ref   (arXiv 2402.01306, eq. 8)

    The sides are two examples, so two losses. kl >= 0 estimates KL(pi || ref) and has no gradient: see mismatch_kl.
    """
    return 1 - torch.sigmoid(beta * (pi_plus - ref_plus - kl)), 1 - torch.sigmoid(beta * (kl - pi_minus + ref_minus))


def sft_loss(pi_plus: Tensor, n_plus: Tensor) -> Tensor:
    """L = -log pi(y+|x) / |y+|: likelihood of the chosen side alone, as a mean over its tokens. Also the anchor."""
    return -pi_plus / n_plus


def unlikelihood_loss(pi_minus: Tensor, cap: float = 0.01) -> Tensor:
    """L = -log(1 - pi(y-|x)): the rejected side alone, as one sequence                     (after arXiv 1908.04319)

    dL/dlog pi = p / (1 - p) is infinite at p = 1, where loops live: within `cap` nats of it, loss and derivative stay
    as they are at the cap, and the gradient still flows.
    """
    x = pi_minus - (pi_minus + cap).clamp(min=0).detach()               # min(pi, -cap) with slope 1
    # log(1 - e^x), each form where it is accurate (Maechler 2012)
    return -torch.where(x > -math.log(2), torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))


def reference_free_loss(pi_plus: Tensor, pi_minus: Tensor, beta: float) -> Tensor:
    """L = -log sigma(beta log pi(y+|x) - beta log pi(y-|x)): dpo_loss without reference, to see what that is for."""
    return -F.logsigmoid(beta * (pi_plus - pi_minus))


def pair_losses(config: Config, pi: Tensor, ref: Tensor, lengths: Tensor, kl: float = 0.0) -> Tensor:
    """Losses [...] of the configured objective (DEV-14); pi, ref, lengths are [..., 2], columns chosen, rejected."""
    (plus, minus), (n_plus, n_minus), beta = pi.unbind(-1), lengths.unbind(-1), config.beta
    both = (plus, minus, *ref.unbind(-1))
    match config.objective:
        case "dpo":
            return dpo_loss(*both, beta)
        case "ipo":
            return ipo_loss(*both, beta, n_plus, n_minus) if config.ipo_average else ipo_loss(*both, beta)
        case "kto":
            return sum(kto_losses(*both, beta, kl)) / 2                 # the mean over the pair's two examples
        case "sft":
            return sft_loss(plus, n_plus)
        case "unlikelihood":
            return unlikelihood_loss(minus)
        case "dpo-anchor":
            return dpo_loss(*both, beta) + config.anchor * sft_loss(plus, n_plus)
        case "reference-free":
            return reference_free_loss(plus, minus, beta)
    raise AssertionError(config.objective)


# ---------------------------------------------------------------------------------------------------------------------
# From loss to gradient

def loss_weights(config: Config, pi: Tensor, ref: Tensor, lengths: Tensor, kl: float = 0.0) -> tuple[Tensor, Tensor]:
    """Losses [...] and their derivatives a = dL/dlog pi [..., 2], both without a graph. For dpo a = (-beta g, +beta g).

    grad L = a_plus grad log pi(y+|x) + a_minus grad log pi(y-|x): nothing else of the loss reaches the model.
    """
    pi = pi.detach().requires_grad_()
    losses = pair_losses(config, pi, ref, lengths, kl)
    return losses.detach(), torch.autograd.grad(losses.sum(), pi)[0]


def ablate(config: Config, weights: Tensor, ref: Tensor, lengths: Tensor) -> Tensor:
    """The weights a under --ablate. Losses are computed before and apart, so none of them changes by a bit.

    plus and minus keep one term; freeze-g takes both weights as they are at pi = ref (for dpo: g = 1/2).
    """
    if config.ablate == "freeze-g":
        return loss_weights(config, ref, ref, lengths)[1]
    return weights * weights.new_tensor({"none": (1, 1), "plus": (1, 0), "minus": (0, 1)}[config.ablate])


class Run(NamedTuple):
    """What a training run consists of."""
    config: Config
    accelerator: Accelerator
    model: PeftModel
    optimizer: torch.optim.Optimizer
    rows: list[Row]
    references: References

    @property
    def weights(self) -> list[torch.nn.Parameter]:
        """What is trained: the adapter."""
        return self.optimizer.param_groups[0]["params"]

    @property
    def steps(self) -> int:
        """Optimiser steps of the whole run."""
        return self.config.epochs * math.ceil(len(self.rows) / self.config.batch)

    def share(self, batch: list) -> list:
        """This process's part of a batch: all of it where there is one process."""
        return batch[self.accelerator.process_index::self.accelerator.num_processes]

    def total(self, tensors: list[Tensor]) -> None:
        """Replace each tensor by its sum over the processes."""
        if self.accelerator.num_processes > 1:
            whole = self.accelerator.reduce(flat(tensors).to(self.model.device), "sum")
            parts = whole.split([tensor.numel() for tensor in tensors])
            for tensor, part in zip(tensors, parts):
                tensor.copy_(part.view_as(tensor))


def train_step(run: Run, step: int) -> dict:
    """Optimiser step `step` (from 0): the batch-mean loss's gradient, pair by pair, then AdamW. Returns what to log."""
    config, batch = run.config, batch_at(step, run.rows, run.config)
    run.references.fill(run, batch)                                             # before any graph exists
    kl = mismatch_kl(run, batch) if config.objective == "kto" else 0.0
    for weight in run.weights:
        weight.grad = torch.zeros_like(weight)
    sums = torch.zeros(len(METRICS), dtype=torch.float64)
    for row in (run.rows[i] for i in run.share(batch)):
        tokens = token_logps(run.model, row, config.impl)                       # [L+], [L-]: the only pass with a graph
        pi, ref, lengths = sides(run, row, tokens)                              # [2] each
        loss, weights = loss_weights(config, pi, ref, lengths, kl)
        scored = torch.stack([each[row.common:].sum() for each in tokens]) if config.suffix_only else pi
        surrogate = (ablate(config, weights, ref, lengths) * scored).sum()      # its gradient is grad L
        (surrogate / len(batch)).backward()                                     # an epoch's last batch may be smaller
        sums += pair_metrics(row, loss, pi, ref, config.beta).cpu()
    run.total([sums])
    run.total([weight.grad for weight in run.weights])
    record = dict(zip(METRICS, (sums / len(batch)).tolist()))
    if step == 0:
        check_start(run, batch, record["loss"])
    norm = float(torch.nn.utils.clip_grad_norm_(run.weights, config.max_grad_norm or math.inf))         # DEV-13
    if not math.isfinite(record["loss"] + norm):
        raise NonFinite(f"step {step + 1}: the loss is {record['loss']}, its gradient's norm {norm}")
    run.optimizer.param_groups[0]["lr"] = lr_at(step, run.steps, config)
    run.optimizer.step()
    return {**record, "grad_norm": norm, "lr": lr_at(step, run.steps, config)}


def sides(run: Run, row: Row, tokens: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """log pi (with its graph), log ref and length of the chosen and the rejected side: [2] each."""
    pi = torch.stack([each.sum() for each in tokens])
    return pi, pi.new_tensor(run.references.known[row.digest()]), pi.new_tensor([len(each) for each in tokens])


METRICS = ("loss", "margin", "accuracy", "logp_chosen", "logp_rejected", "ref_chosen", "ref_rejected", "g", "tokens")


def pair_metrics(row: Row, loss: Tensor, pi: Tensor, ref: Tensor, beta: float) -> Tensor:
    """The METRICS of one pair; their means over the optimiser batch are logged.

    margin z as in dpo_loss; accuracy 1 if z > 0, 1/2 if z = 0, else 0; g = sigma(-z); tokens: the prompt once and both
    completions. log pi of both sides are there because a margin does not say whether both fall.
    """
    z, tokens = margin(*pi.detach(), *ref, beta), len(row.prompt) + sum(map(len, row.branches))
    return torch.stack([loss, z, (z.sign() + 1) / 2, *pi.detach(), *ref, torch.sigmoid(-z), z.new_tensor(tokens)])


def lr_at(step: int, steps: int, config: Config) -> float:
    """Learning rate of step `step` (from 0) of `steps`: rising, then cosine, line or constant.         DEV-12"""
    warm = math.ceil(config.warmup * steps)
    if step < warm:
        return config.lr * (step + 1) / warm
    done = (step - warm) / max(1, steps - warm)
    shapes = {"cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done, "constant": 1.0}
    return config.lr * shapes[config.schedule]


def mismatch_kl(run: Run, batch: list[int]) -> float:
    """KTO's KL: the batch mean of log pi/ref of the next pair's chosen side under this pair's prompt, at least 0.

    A pass of its own, without graph and before the others, so that it does not depend on how the batch is split. In a
    batch of one the next pair is the pair itself.
    """
    pairs = zip(batch, batch[1:] + batch[:1])
    rows = run.share([run.rows[i]._replace(branches=run.rows[following].branches[:1]) for i, following in pairs])
    with torch.no_grad():
        pi = sum(float(pair_logps(run.model, row, run.config.impl)) for row in rows)
    ratio = torch.tensor([pi - sum(logps[0] for logps in reference_logps(run, rows))])
    run.total([ratio])
    return max(0.0, float(ratio) / len(batch))


# ---------------------------------------------------------------------------------------------------------------------
# The reference: the same model with its adapter off, through the same code

TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-4, torch.bfloat16: 0.1}     # nats a token, of equal computations


def reference_logps(run: Run, rows: list[Row]) -> list[list[float]]:
    """log ref(y|x) of every branch of every row."""
    with torch.no_grad(), run.model.disable_adapter():
        return [pair_logps(run.model, row, run.config.impl).tolist() for row in rows]


class References:
    """Reference log-probs by Row.digest(), backed by a JSONL file that runs may share.

    base names what else they depend on (see fingerprint), so that another model finds nothing in the file.
    """

    def __init__(self, path: Path, base: str):
        self.path, self.base, self.known = path, base, {}
        for line, record in read_repaired(path):
            if not all(math.isfinite(logp) for logps in record["logps"].values() for logp in logps):
                raise InputError(f"{path}, line {line}: a reference log-prob is not finite; delete the file")
            if record["base"] == base:
                self.known.update(record["logps"])

    def fill(self, run: Run, batch: list[int]) -> None:
        """Compute what is not known of a batch; every process gets all of it, the main one writes it down."""
        missing = [row for row in (run.rows[i] for i in run.share(batch)) if row.digest() not in self.known]
        new = {row.digest(): logps for row, logps in zip(missing, reference_logps(run, missing) if missing else [])}
        if run.accelerator.num_processes > 1:
            new = {key: logps for part in gather_object([new]) for key, logps in part.items()}
        self.known.update(new)
        if new and run.accelerator.is_main_process:
            deloop.append_jsonl(self.path, {"base": self.base, "logps": new})


def check_references(run: Run) -> None:
    """Compute 8 known rows again; raise InputError where the file says otherwise."""
    rows = [row for row in run.rows if row.digest() in run.references.known][:8]
    for row, fresh in zip(rows, reference_logps(run, rows)):
        for branch, now, known in zip(row.branches, fresh, run.references.known[row.digest()]):
            if not abs(now - known) <= TOLERANCE[run.model.dtype] * len(branch):
                raise InputError(f"{run.references.path} is stale: {row.name} had {known}, now {now}; delete the file")


def check_impl(run: Run) -> None:
    """Compare prefix with naive on the first and the longest pair; raise InputError where they differ."""
    for row in (run.rows[0], max(run.rows, key=lambda row: row.longest)) if run.config.impl == "prefix" else ():
        with torch.no_grad():
            both = [torch.cat(token_logps(run.model, row, impl)) for impl in ("prefix", "naive")]
        error = float((both[0] - both[1]).abs().mean())
        if not error <= TOLERANCE[run.model.dtype]:
            raise InputError(f"self-check on {row.name}: prefix and naive differ by {error:.2g} nats a token; "
                             f"use --impl naive")


def check_start(run: Run, batch: list[int], loss: float) -> None:
    """Raise InputError unless the first loss is the objective's value at pi = ref: for dpo ln 2."""
    refs = torch.tensor([run.references.known[run.rows[i].digest()] for i in batch])
    lengths = torch.tensor([[len(branch) for branch in run.rows[i].branches] for i in batch])
    expected = float(pair_losses(run.config, refs, refs, lengths).mean())
    if not math.isclose(loss, expected, rel_tol=1e-3):
        name = "ln 2 = " if run.config.objective == "dpo" else ""
        raise InputError(f"the loss at step 0 is {loss:.6f}, not {name}{expected:.6f}: policy and reference differ "
                         f"before any training. Usual cause: a dropout in the model's config.json")


# ---------------------------------------------------------------------------------------------------------------------
# Taking the gradient apart

def log_terms(run: Run, step: int) -> tuple[dict, dict[str, Tensor]]:
    """T+ = mean a_plus grad log pi(y+) and T- likewise over the batch of a step: what to log of them, and both vectors.

    Norms and cosine on all tokens, and on the suffixes where the sides differ: tokens that both begin with swell both
    terms and cancel in the sum. g_quartiles: minimum, quartiles, maximum. Nothing is ablated and no .grad is touched.
    """
    run.references.fill(run, batch := batch_at(step, run.rows, run.config))
    kl = mismatch_kl(run, batch) if run.config.objective == "kto" else 0.0
    size, device = sum(weight.numel() for weight in run.weights), run.model.device
    terms = {(name, side): torch.zeros(size, device=device) for name in ("all", "suffix") for side in (0, 1)}
    gs = torch.zeros(len(batch), device=device)
    for place, i in run.share([*enumerate(batch)]):
        tokens = token_logps(run.model, row := run.rows[i], run.config.impl)
        pi, ref, lengths = sides(run, row, tokens)
        gs[place] = torch.sigmoid(-margin(*pi.detach(), *ref, run.config.beta))
        a = loss_weights(run.config, pi, ref, lengths, kl)[1] / len(batch)
        for name, side in terms:
            part = tokens[side][row.common:] if name == "suffix" else tokens[side]
            terms[name, side] += flat(torch.autograd.grad(a[side] * part.sum(), run.weights, retain_graph=True))
    run.total([gs, *terms.values()])
    record = {name: {"norm_plus": float(terms[name, 0].norm()), "norm_minus": float(terms[name, 1].norm()),
                     "cosine": cosine(terms[name, 0], terms[name, 1])} for name in ("all", "suffix")}
    record["g_quartiles"] = gs.quantile(torch.linspace(0, 1, 5, device=device)).tolist()
    return record, {"update_plus": terms["all", 0], "update_minus": terms["all", 1]}


def measured_step(run: Run, step: int) -> dict:
    """train_step, and every --log-terms steps log_terms too, with the cosines of the update with -T+ and with -T-."""
    if not run.config.log_terms or step % run.config.log_terms:
        return train_step(run, step)
    record, vectors = log_terms(run, step)
    before = flat(run.weights)
    metrics = train_step(run, step)
    update = flat(run.weights) - before                 # Adam hides the gradient's scale: this is what really happened
    return {**metrics, "terms": {**record, **{name: cosine(update, -vector) for name, vector in vectors.items()}}}


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """All entries of some tensors as one vector, a copy without graph."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def cosine(a: Tensor, b: Tensor) -> float:
    """Cosine of the angle between two vectors; 0 where one is 0."""
    return float(F.cosine_similarity(a, b, dim=0))


# ---------------------------------------------------------------------------------------------------------------------
# The model

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")     # attention and MLP


def pretrained(kind: Any, config: Config, **keywords: Any) -> Any:
    """kind.from_pretrained(--model); InputError where there is no such model."""
    try:
        if (Path(config.model) / "adapter_config.json").exists():
            raise ValueError("an adapter, not a base model; merge it into its base first")
        return kind.from_pretrained(config.model, **keywords)
    except (OSError, ValueError) as error:
        raise InputError(f"--model {config.model}: {str(error).strip().splitlines()[0]}") from None


def prefix_or_naive(config: Config, say: Callable = print) -> Config:
    """The configuration, with naive for prefix where the model's family is not known to work with it; says so."""
    model = pretrained(transformers.AutoConfig, config)
    sliding = getattr(model, "use_sliding_window", False)
    if config.impl == "naive" or (model.model_type in PREFIX_FAMILIES and not sliding):
        return config
    say(f"--impl naive: prefix sharing is tested for {' and '.join(PREFIX_FAMILIES)}, not for {model.model_type}")
    return dataclasses.replace(config, impl="naive")


def load_model(config: Config, device: torch.device) -> PeftModel:
    """The frozen base model in bf16 (GPU) or fp32 (CPU) with a fresh fp32 LoRA adapter on every projection.

    fp32, since bf16 weights do not move at a learning rate of 8e-6. No dropout: the policy's pass is the reference's.
    """
    auto = torch.bfloat16 if device.type == "cuda" else torch.float32
    base = pretrained(transformers.AutoModelForCausalLM, config, attn_implementation="sdpa",
                      dtype=auto if config.dtype == "auto" else getattr(torch, config.dtype))
    if config.impl == "prefix":
        base.set_attn_implementation("deloop_prefix")
    names = {name.rpartition(".")[2] for name, _ in base.named_modules()}
    torch.manual_seed(config.seed)
    model = get_peft_model(base, LoraConfig(
        r=config.rank, lora_alpha=config.alpha, lora_dropout=0.0, task_type="CAUSAL_LM",
        target_modules=list(PROJECTIONS) if names.issuperset(PROJECTIONS) else "all-linear"))
    assert all(weight.dtype == torch.float32 for weight in model.parameters() if weight.requires_grad), "bf16 adapter"
    return model.to(device).train()


def checkpoint_activations(config: Config, model: PeftModel, tokens: int) -> bool:
    """Switch gradient checkpointing on if asked to, or on auto if the activations of a row of `tokens` would not fit.

    Of each token, about 75 bytes a layer and hidden unit wait for the backward pass (300 KB a layer in Qwen3-8B).
    """
    need = 75 * tokens * model.config.num_hidden_layers * model.config.hidden_size
    fits = model.device.type != "cuda" or need < 0.9 * torch.cuda.mem_get_info()[0]
    on = config.gradient_checkpointing == "on" or (config.gradient_checkpointing == "auto" and not fits)
    if on:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return on


def fingerprint(model: torch.nn.Module, impl: str) -> str:
    """Hash of a base model (64 values of every weight, all shapes and dtypes) and of how log-probs are computed."""
    digest = hashlib.sha256(f"deloop-logps/1 {impl}".encode())
    for name, weight in model.named_parameters():
        if "lora_" not in name:
            values = weight.detach().flatten()
            digest.update(f"{name} {tuple(weight.shape)} {weight.dtype} ".encode())
            digest.update(values[::max(1, len(values) // 64)].float().cpu().numpy().tobytes())
    return digest.hexdigest()


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints and resume

FREE = ("out", "pairs", "model", "reference_cache", "log_terms", "save_every", "keep", "plot", "threads")   # may change


def save(run: Run, step: int, about: dict, publish: bool = False) -> None:
    """Write the state after `step` steps as one folder, whole or not at all, and drop old ones; the last step, and
    publish, also put the adapter into --out itself."""
    out = Path(run.config.out)
    state = json.dumps({**about, "step": step, "done": step == run.steps}, indent=1)
    final, temporary = out / f"checkpoint-{step:06d}", out / f".checkpoint-{step:06d}.tmp"
    if not final.exists():
        shutil.rmtree(temporary, ignore_errors=True)
        run.model.save_pretrained(temporary, save_embedding_layers=False)
        torch.save(run.optimizer.state_dict(), temporary / "optimizer.pt")
        (temporary / "state.json").write_text(state)
        os.replace(temporary, final)
    for old in checkpoints(out)[:-max(1, run.config.keep)]:
        shutil.rmtree(old)
    if publish or step == run.steps:
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            shutil.copyfile(final / name, out / f".{name}.tmp")
            os.replace(out / f".{name}.tmp", out / name)
    deloop.write_atomic(out / "state.json", state)


def checkpoints(out: Path) -> list[Path]:
    """Whole checkpoint folders, oldest first."""
    return sorted(out.glob("checkpoint-" + "[0-9]" * 6))


def claim(config: Config, about: dict) -> bool:
    """Whether --out already holds this very run, finished; InputError where it holds anything else."""
    out = Path(config.out)
    if not (out / "state.json").exists():
        if (out / "adapter_config.json").exists():
            base = json.loads((out / "adapter_config.json").read_text()).get("base_model_name_or_path")
            raise InputError(f"--out {out} holds an adapter of {base} that this script did not write; give another one")
        return False
    state = json.loads((out / "state.json").read_text())
    changed = [f"--{key.replace('_', '-')} {value}" for key, value in state["config"].items()
               if key not in FREE and value != about["config"].get(key)]
    changed += [f"other {key}" for key in ("pairs", "base model") if key in about and state[key] != about[key]]
    if changed:
        raise InputError(f"--out {out} holds another run ({', '.join(changed)}); give another folder or delete it")
    return state["done"]


def resume(run: Run) -> int:
    """Load the newest checkpoint, if any, and return its number of steps; what was logged after it goes."""
    out, step = Path(run.config.out), 0
    if found := checkpoints(out)[-1:]:
        step = json.loads((found[0] / "state.json").read_text())["step"]
        set_peft_model_state_dict(run.model, load_peft_weights(str(found[0]), device="cpu"))
        run.optimizer.load_state_dict(torch.load(found[0] / "optimizer.pt", map_location="cpu", weights_only=True))
    if run.accelerator.is_main_process:
        for temporary in out.glob(".checkpoint-*.tmp"):
            shutil.rmtree(temporary)
        records = [record for _, record in read_repaired(out / "metrics.jsonl") if record["step"] <= step]
        deloop.write_atomic(out / "metrics.jsonl", "".join(json.dumps(record) + "\n" for record in records))
    run.accelerator.wait_for_everyone()                 # until all have read, none may write
    return step


def read_repaired(path: Path) -> Iterator[tuple[int, Any]]:
    """read_jsonl of a file that may not be there yet and whose last line a kill may have cut: that line goes."""
    if path.exists():
        text = path.read_bytes()
        if not text.endswith(b"\n"):
            deloop.write_atomic(path, text[:text.rfind(b"\n") + 1].decode())
        yield from deloop.read_jsonl(path)


# ---------------------------------------------------------------------------------------------------------------------
# The loop, and what a person sees of it

class NonFinite(Exception):
    """A loss or a gradient that is no number; the weights are still those of the step before."""


def main(argv: list[str]) -> int:
    """python train.py --pairs FILE --model NAME_OR_DIR --out DIR; returns the exit code."""
    config = deloop.config_from_args(Config, argv, __doc__)
    for name in ("batch", "epochs", "rank", "save_every"):
        if getattr(config, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} must be at least 1")
    sys.stdout.reconfigure(line_buffering=True)         # progress is seen while it is made, through a pipe too
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", ".*gradient_checkpointing.* is deprecated")   # the old names, as PEFT has them
    if config.threads:
        torch.set_num_threads(config.threads)
    accelerator = Accelerator()
    say = accelerator.print
    config = prefix_or_naive(config, say)
    say("config", json.dumps(dataclasses.asdict(config)))
    tokenizer = pretrained(transformers.AutoTokenizer, config)
    if not tokenizer.chat_template:
        raise InputError(f"--model {config.model}: its tokenizer has no chat template, so no prompt can be rendered")
    rows, counts = load_rows(config, tokenizer, say)
    say("pairs:", ", ".join(f"{count} {fate}" for fate, count in counts.items()))
    about = {"format": "deloop-train/1", "step": 0, "done": False, "config": dataclasses.asdict(config),
             "counts": counts, "pairs": hashlib.sha256("".join(map(Row.digest, rows)).encode()).hexdigest(),
             "versions": {"torch": torch.__version__, "transformers": transformers.__version__}}
    if claim(config, about):
        say(f"{config.out} is finished, nothing to do")
    else:
        with memory_hint(config):
            train(open_run(config, accelerator, rows, about), about)
    say(summary(config))
    return 0


def open_run(config: Config, accelerator: Accelerator, rows: list[Row], about: dict) -> Run:
    """Model, optimiser and references, all checked; state.json claims --out for this run."""
    model, out = load_model(config, accelerator.device), Path(config.out)
    about["base model"] = fingerprint(model, config.impl)
    claim(config, about)
    out.mkdir(parents=True, exist_ok=True)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=config.lr, betas=(0.9, 0.999), weight_decay=0.0)          # DEV-11
    references = References(Path(config.reference_cache or out / "references.jsonl"), about["base model"])
    run = Run(config, accelerator, model, optimizer, rows, references)
    check_impl(run)
    check_references(run)
    twice = checkpoint_activations(config, model, max(len(row.prompt) + sum(map(len, row.branches)) for row in rows))
    accelerator.print(f"model: {model.num_parameters():,} weights in {model.dtype}, {sum(map(torch.numel, weights)):,} "
                      f"trained in float32, gradient checkpointing {'on' if twice else 'off'}, "
                      f"{accelerator.num_processes} x {model.device.type}")
    if accelerator.is_main_process and not (out / "state.json").exists():
        deloop.write_atomic(out / "state.json", json.dumps(about, indent=1))
    return run


def train(run: Run, about: dict) -> None:
    """Every step from the newest checkpoint on."""
    config, out, main_process = run.config, Path(run.config.out), run.accelerator.is_main_process
    first, started = resume(run), time.monotonic()
    run.accelerator.print(f"steps: {run.steps} of {config.batch} pairs, {first} done")
    for step in range(first, run.steps):
        begun = time.monotonic()
        try:
            metrics = measured_step(run, step)
        except NonFinite as error:
            if main_process:
                save(run, step, about, publish=True)
            run.accelerator.wait_for_everyone()
            raise InputError(f"{error}; the adapter of step {step} is saved in {out}. Try a lower --lr") from None
        seconds, tokens = time.monotonic() - begun, metrics["tokens"] * len(batch_at(step, run.rows, config))
        record = {"step": step + 1, "steps": run.steps, **metrics, "seconds": round(seconds, 3),
                  "tokens_per_second": round(tokens / seconds, 1), "gb": memory_gb(run)}
        pace = (time.monotonic() - started) / (step + 1 - first)
        run.accelerator.print(progress(record, pace * (run.steps - step - 1)))
        if main_process:
            deloop.append_jsonl(out / "metrics.jsonl", record)
            if (step + 1) % config.save_every == 0:
                save(run, step + 1, about)
    if main_process:
        if config.plot:
            deloop.write_atomic(out / "curves.svg", curves(records_of(config)))
        save(run, run.steps, about)
    run.accelerator.wait_for_everyone()


@contextlib.contextmanager
def memory_hint(config: Config) -> Iterator[None]:
    """Make "out of memory", on a GPU or a CPU, an InputError that names the flags that help."""
    try:
        yield
    except RuntimeError as error:               # torch.OutOfMemoryError is one; the CPU allocator has no own type
        if not any(sign in str(error).lower() for sign in ("out of memory", "can't allocate memory")):
            raise
        raise InputError(f"out of memory; what helps: --gradient-checkpointing on, --impl prefix, --dtype bfloat16, "
                         f"--max-length below {config.max_length}. --batch does not: pairs run one by one") from None


def memory_gb(run: Run) -> float:
    """Peak memory in GB: of the GPU, or on a CPU of this process."""
    if run.model.device.type == "cuda":
        return round(torch.cuda.max_memory_allocated() / 1e9, 3)
    unit = 1 if sys.platform == "darwin" else 1024      # of ru_maxrss, in bytes
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9, 3)


def progress(record: dict, left: float) -> str:
    """One step as one line; left is the time left in seconds."""
    return ("step {step}/{steps}  loss {loss:.4f}  margin {margin:+.3f}  acc {accuracy:.2f}  log pi+ {logp_chosen:.2f}"
            "  log pi- {logp_rejected:.2f}  |grad| {grad_norm:.3g}  lr {lr:.1e}  {tokens_per_second:.0f} tokens/s"
            "  {gb:.1f} GB  ".format(**record) + f"{datetime.timedelta(seconds=round(left))} left")


def summary(config: Config) -> str:
    """First step against last, where the adapter is, and the commands that show what it does."""
    records = records_of(config)
    changes = [f"  {key:14}{records[0][key]:10.4f} ->{records[-1][key]:10.4f}\n" for key in METRICS[:5]]
    return (f"{len(records)} steps in {sum(record['seconds'] for record in records):.0f} s; first step -> last step:\n"
            f"{''.join(changes)}adapter: {config.out}\nevaluate it: python rollout.py --server URL --tasks FILE "
            f"--model {config.model} --adapter {config.out} --out trained.jsonl\n"
            f"             python eval.py base.jsonl trained.jsonl")


def records_of(config: Config) -> list[dict]:
    """All of metrics.jsonl."""
    return [record for _, record in deloop.read_jsonl(Path(config.out) / "metrics.jsonl")]


def curves(records: list[dict]) -> str:
    """The run as an SVG picture: one panel a metric, steps to the right, the range written above."""
    wide, high, panels = 420, 120, []
    for place, key in enumerate((*METRICS[:5], "grad_norm")):
        values = [record[key] for record in records]
        low, span = min(values), max(values) - min(values) or 1.0
        points = " ".join(f"{wide * i / max(1, len(values) - 1):.1f},{high - high * (value - low) / span:.1f}"
                          for i, value in enumerate(values))
        panels.append(f'<g transform="translate(20,{30 + place * (high + 40)})"><text y="-6">{key}: {low:.4g} to '
                      f'{max(values):.4g}</text><polyline points="{points}" fill="none" stroke="#1f6feb"/></g>')
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide + 40}" height="{len(panels) * (high + 40) + 20}" '
            f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
            f'{"".join(panels)}</svg>\n')


if __name__ == "__main__":
    deloop.run(main)
