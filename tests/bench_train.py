"""Speed and memory of one pair's way through training: python tests/bench_train.py [--quick | --gpu]

Compares, on the same random model, pairs and LoRA adapter, one process a measurement so that each peak is its own:
    naive            train.py --impl naive, one row a side
    prefix           train.py --impl prefix, one row a pair: what train.py does
    TRL              TRL's DPOTrainer (python -m pip install trl; a development aid), its reference computed every epoch
    TRL, references known    the same with precompute_ref_log_probs, which is TRL's best for later epochs

A step is a whole optimiser step (references, forward, backward, AdamW) on a batch of equally long pairs, after one step
that is not timed. First epoch: reference log-probs are computed too; later epochs: ours are known. Peak memory is the
process's, on a GPU the allocator's; beside it stands what training adds to the loaded model. Gradient: relative error
|grad - naive's| / |naive's| of the whole adapter on the first batch. Ratios are against TRL, without it against naive.
On a CPU, TRL makes logits at every position, on a GPU only where a completion token is predicted, as train.py does: the
ratios at the large vocabulary are a CPU's alone.
"""
from __future__ import annotations

import argparse
import datetime
import importlib.util
import itertools
import json
import os
import platform
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# torch is imported where it is used: a process starts with the peak of the one that made it, which must stay small.
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SHAPES = {
    "smoke": dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                  num_key_value_heads=2, head_dim=8),
    "laptop": dict(hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
                   num_key_value_heads=2, head_dim=64),
    "8b": dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
               num_key_value_heads=8, head_dim=128, tie_word_embeddings=False),      # Qwen/Qwen3-8B's config.json
}
GRID = {  # what is measured: shapes, completion, prompts, vocabularies, checkpointing, pairs a step, timed steps
    "cpu": ("laptop", 64, (512, 1024, 2048), (4_096, 150_000), ("off",), 2, 2),
    "quick": ("laptop", 64, (512,), (4_096,), ("off",), 2, 1),
    "gpu": ("8b", 100, (3750,), (151_936,), ("off", "on"), 4, 2),
    "smoke": ("smoke", 8, (32,), (128,), ("off", "on"), 2, 1),
}
WAYS = ("naive", "prefix", "TRL", "TRL, references known")
LORA = dict(r=32, lora_alpha=64, lora_dropout=0.0, task_type="CAUSAL_LM")
STEP = dict(beta=0.05, lr=1e-5)


def pairs(case: dict) -> list[tuple[list[int], list[int], list[int]]]:
    """Random (prompt, chosen, rejected) ids: a step's batch, the same in every step."""
    rng = random.Random(case["seed"])
    return [tuple([rng.randrange(4, case["vocabulary"]) for _ in range(length)]
                  for length in (case["prompt"], case["completion"], case["completion"])) for _ in range(case["pairs"])]


def base_model(case: dict) -> Any:
    """The frozen base with random weights, bf16 on a GPU, fp32 on a CPU; the same for every way."""
    import torch
    import transformers
    device = "cuda" if case["device"] == "cuda" else "cpu"
    config = transformers.Qwen3Config(vocab_size=case["vocabulary"], max_position_embeddings=40960,
                                      **SHAPES[case["shapes"]])
    torch.manual_seed(case["seed"])
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16 if device == "cuda" else torch.float32, attn_implementation="sdpa")


def adapter(model: Any) -> list:
    """The weights that are trained, all set to random numbers that depend on nothing but their place and shape."""
    import torch
    generator = torch.Generator().manual_seed(1)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    with torch.no_grad():
        for weight in weights:
            weight.copy_(0.02 * torch.randn(weight.shape, generator=generator))
    return weights


class Meter:
    """Seconds of steps, the first batch's gradient, and memory, of this process."""

    def __init__(self, case: dict):
        import psutil
        import torch
        self.torch, self.cuda, self.gradient = torch, case["device"] == "cuda", None
        self.loaded = torch.cuda.memory_allocated() if self.cuda else psutil.Process().memory_info().rss

    def now(self) -> float:
        """The clock, once the GPU has done what it was asked."""
        if self.cuda:
            self.torch.cuda.synchronize()
        return time.perf_counter()

    def keep_gradient(self, weights: list) -> None:
        """Copy the adapter's gradient to main memory, once."""
        if self.gradient is None:
            self.gradient = [weight.grad.detach().float().cpu().clone() for weight in weights]

    def result(self, case: dict, first: list[float], later: list[float]) -> dict:
        """The measurement; the gradient is written by naive and compared by the others, after the peak is read."""
        unit = 1 if sys.platform == "darwin" else 1024          # of ru_maxrss
        peak = (self.torch.cuda.max_memory_allocated() if self.cuda
                else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
        if case["way"] == "naive":
            self.torch.save(self.gradient, case["gradient"])
        known = Path(case["gradient"]).exists() and self.torch.load(case["gradient"])       # naive may not have fitted
        error = known and (sum(float((a - b).square().sum()) for a, b in zip(self.gradient, known, strict=True))
                           / sum(float(b.square().sum()) for b in known)) ** 0.5
        return {"first": case["pairs"] / min(first) if first else None,
                "later": case["pairs"] / min(later) if later else None,
                "peak": peak / 1e9, "above": (peak - self.loaded) / 1e9, "error": f"{error:.0e}" if known else "-"}


def measure_ours(case: dict) -> dict:
    """train.py's own train_step; its references are forgotten before a step of the first epoch."""
    import peft
    import torch
    from accelerate import Accelerator

    import train
    model, timed = base_model(case), case["steps"]
    if case["way"] == "prefix":
        model.set_attn_implementation("deloop_prefix")
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=list(train.PROJECTIONS), **LORA)).train()
    weights = adapter(model)
    with tempfile.TemporaryDirectory() as folder:
        config = train.Config(pairs="", model="", out=folder, impl=case["way"], batch=case["pairs"], max_grad_norm=0.0,
                              epochs=2 + 2 * timed, gradient_checkpointing=case["checkpointing"], **STEP)
        train.checkpoint_activations(config, model, 0)
        run = train.Run(config, Accelerator(), model, torch.optim.AdamW(weights, lr=config.lr, weight_decay=0.0),
                        [train.Row("", prompt, sides) for prompt, *sides in pairs(case)],
                        train.References(Path(folder) / "references.jsonl", train.fingerprint(model, case["way"])))
        meter, first, later = Meter(case), [], []
        train.train_step(run, 1)                    # not 0: the adapter does not start at the reference
        meter.keep_gradient(weights)
        for step in range(2, 2 + timed):
            for seconds in (first, later):
                run.references.known.clear() if seconds is first else None
                began = meter.now()
                train.train_step(run, step)
                seconds.append(meter.now() - began)
    return meter.result(case, first, later)


def measure_trl(case: dict) -> dict:
    """TRL's DPOTrainer.train(); a step lasts from the end of the one before to its own end."""
    import datasets
    import peft
    import tokenizers
    import transformers
    import trl

    import train

    class Trainer(trl.DPOTrainer):
        def _prepare_dataset(self, dataset, *others):   # the pairs are ids already
            return dataset

    class Watch(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *others, **keywords):
            meter.keep_gradient(weights)

        def on_step_end(self, *others, **keywords):
            ends.append(meter.now())

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    data = datasets.Dataset.from_list([dict(zip(("prompt_ids", "chosen_ids", "rejected_ids"), pair))
                                       for pair in pairs(case)])
    known, ends = case["way"] == WAYS[3], []
    with tempfile.TemporaryDirectory() as folder:
        config = trl.DPOConfig(
            folder, beta=STEP["beta"], learning_rate=STEP["lr"], weight_decay=0.0, max_grad_norm=0.0, max_length=None,
            per_device_train_batch_size=1, gradient_accumulation_steps=case["pairs"], max_steps=1 + case["steps"],
            gradient_checkpointing=case["checkpointing"] == "on", precompute_ref_log_probs=known, save_strategy="no",
            bf16=case["device"] == "cuda", use_cpu=case["device"] != "cuda", report_to="none", disable_tqdm=True)
        trainer = Trainer(base_model(case), args=config, train_dataset=data, processing_class=tokenizer,
                          callbacks=[Watch()],
                          peft_config=peft.LoraConfig(target_modules=list(train.PROJECTIONS), **LORA))
        weights, meter = adapter(trainer.model), Meter(case)
        trainer.train()
    seconds = [end - start for start, end in zip(ends, ends[1:])]
    return meter.result(case, [] if known else seconds, seconds if known else [])


def measure(case: dict) -> dict:
    """One case in this process; {"failed": why} where it does not fit."""
    import torch
    try:
        return (measure_trl if case["way"].startswith("TRL") else measure_ours)(case)
    except torch.OutOfMemoryError:
        return {"failed": "out of memory"}


def in_a_process(case: dict) -> dict:
    """measure(case) in a fresh process; what it prints beside the result goes to our stderr only when it fails."""
    done = subprocess.run([sys.executable, __file__, "--one", json.dumps(case)], capture_output=True, text=True,
                          env={"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "passive", **os.environ})
    if done.returncode:
        raise SystemExit(f"error: {case['way']} failed:\n{done.stderr.strip()}")
    return json.loads(done.stdout.splitlines()[-1])


def row(case: dict, result: dict, other: dict, hours: bool) -> str:
    """One line of the table; ratios against the result `other`."""
    def ratio(key: str, digits: int = 2) -> str:
        value, base = result.get(key), other.get(key)
        return "-" if value is None else f"{value:.{digits}f}" + (f" ({value / base:.2f}x)" if base else "")

    cells = [f"{case['prompt']:,}", f"{case['vocabulary']:,}", case["checkpointing"], case["way"]]
    if "failed" in result:
        return "| " + " | ".join([*cells, result["failed"], *["-"] * (5 if hours else 4)]) + " |"
    cells += [ratio("first"), ratio("later"), ratio("peak"), ratio("above"), result["error"]]
    if hours:
        pace = result["first"] or result["later"]
        cells.append(f"{8000 / pace / 3600:.1f} h")
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Measure the grid case by case and print the table as it grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    grid = parser.add_mutually_exclusive_group()
    for name, what in (("quick", "the smallest size only"), ("gpu", "Qwen3-8B's shapes on the GPU, random weights"),
                       ("smoke", argparse.SUPPRESS)):
        grid.add_argument(f"--{name}", dest="grid", action="store_const", const=name, default="cpu", help=what)
    parser.add_argument("--seed", type=int, default=0, help="seed of model and pairs [%(default)s]")
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one)))
        return
    shapes, completion, prompts, vocabularies, checkpointing, count, steps = GRID[options.grid]
    gpu, trl = options.grid == "gpu", all(importlib.util.find_spec(each) for each in ("trl", "datasets"))
    ways = WAYS if trl else WAYS[:2]
    print(f"{machine(gpu)}; {datetime.date.today()}; seed {options.seed}; {shapes} model {json.dumps(SHAPES[shapes])}; "
          f"completions of {completion} tokens; {count} pairs a step, the best of {steps} steps; "
          f"ratios against {'TRL' if trl else 'naive (TRL is not installed)'}\n")
    head = ["prompt", "vocabulary", "checkpointing", "way", "pairs/s, first epoch", "later epochs", "peak GB",
            "above the model", "gradient error", *["8,000 pairs"] * gpu]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    with tempfile.TemporaryDirectory() as folder:
        for vocabulary, prompt, twice in itertools.product(vocabularies, prompts, checkpointing):
            case = dict(shapes=shapes, completion=completion, prompt=prompt, vocabulary=vocabulary, pairs=count,
                        checkpointing=twice, steps=steps, seed=options.seed, device="cuda" if gpu else "cpu",
                        gradient=str(Path(folder) / f"{prompt}-{vocabulary}-{twice}.pt"))
            results = {way: in_a_process({**case, "way": way}) for way in ways}
            other = {**results[ways[-1]], **results[ways[-2]], "later": results[ways[-1]].get("later")} if trl else (
                results["naive"])
            for way in ways:
                print(row({**case, "way": way}, results[way], other, gpu), flush=True)


def machine(gpu: bool) -> str:
    """Processor or graphics card, and the versions that matter."""
    from importlib.metadata import version
    if gpu:
        name = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True,
                              text=True, check=True).stdout.strip()
    else:
        info = Path("/proc/cpuinfo")
        models = [line.partition(":")[2].strip() for line in (info.read_text().splitlines() if info.exists() else ())
                  if line.startswith("model name")]
        name = f"{os.cpu_count()} cores of {(models or [platform.processor()])[0]}"
    return ", ".join([name, *(f"{each} {version(each)}" for each in ("torch", "transformers", "peft", "trl")
                              if importlib.util.find_spec(each))])


if __name__ == "__main__":
    main()
