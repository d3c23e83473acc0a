"""Shared by the tests: the rooms on the path, one thread each, and a random model that is ready in a second."""
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")       # before torch: test processes side by side must not fight for cores
os.environ.setdefault("HF_HUB_OFFLINE", "1")        # nothing here needs a network
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import pytest

TEMPLATE = ("{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


@pytest.fixture(scope="session")
def random_model(tmp_path_factory):
    """A folder with an untrained two-layer Qwen3 (grouped queries; weights large enough that its rows differ) and a
    tokenizer of single bytes."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    folder = str(tmp_path_factory.mktemp("random_model"))
    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    raw = Tokenizer(models.BPE(vocab=letters, merges=[]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"], chat_template=TEMPLATE)
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=4096, initializer_range=0.3,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=None))
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder
