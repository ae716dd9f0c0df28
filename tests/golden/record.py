"""Record what transformers computes, for the tests to compare with. Run by hand: the tests read the files beside it.

    pip install -e '.[golden]' accelerate        torch for CPUs is enough
    python tests/golden/record.py [tiny] [saved] [default-model]

tiny            logits.npz: logits of the tiny random checkpoints that tests/checkpoints.py writes, and their digests
saved           saved/: tiny checkpoints as save_pretrained leaves them, with their logits
default-model   default_model.json: what the default model says in float32 on the weights that its GGUF file stands for
                (greedy continuations of PROMPTS, the perplexity of text.txt)

text.txt was written for this project and is under its licence.
"""

import hashlib
import json
import math
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

GOLDEN = Path(__file__).parent
sys.path.insert(0, str(GOLDEN.parent))

import checkpoints  # noqa: E402

CONTEXT = 80  # tokens: more than a cache block
KEPT = slice(4, None, 5)  # the positions whose logits are kept, the last among them
NEW_TOKENS = 64
PROMPTS = (
    "Once upon a time",
    "The three laws of thermodynamics are",
    "def fibonacci(n):\n",
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
    "La capitale de la France est",
)


def logits_of(model: Any, ids: list[int]) -> npt.NDArray[np.float32]:
    with torch.no_grad():
        logits: npt.NDArray[np.float32] = model(torch.tensor([ids])).logits[0].numpy()
    return logits


def load(folder: Path, **options: Any) -> Any:
    """The plainest path through transformers: float32, and attention written out."""
    options |= {"dtype": torch.float32, "attn_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def record_tiny() -> None:
    arrays: dict[str, npt.NDArray[Any]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name, config in {**checkpoints.LLAMAS, **checkpoints.GPT2S}.items():
            folder = checkpoints.write_checkpoint(Path(temporary) / name, config)
            ids = checkpoints.random_ids(config, CONTEXT)
            arrays[f"{name}/digest"] = np.array(checkpoints.digest_of(folder))
            arrays[f"{name}/ids"] = np.array(ids, np.int32)
            arrays[f"{name}/positions"] = np.arange(CONTEXT)[KEPT]
            arrays[f"{name}/logits"] = logits_of(load(folder), ids)[KEPT]
    np.savez_compressed(GOLDEN / "logits.npz", **arrays)


def record_saved() -> None:
    """Folders with the names, dtypes, fields and shards that transformers writes, and weights of its own choice."""
    torch.manual_seed(0)
    tiny = {"vocab_size": 61, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3, "dtype": "bfloat16"}
    configs = {
        "llama": LlamaConfig(
            hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1,
            max_position_embeddings=64, tie_word_embeddings=True, **tiny,
        ),
        "gpt2": GPT2Config(n_embd=24, n_layer=2, n_head=3, n_positions=64, **tiny),
    }  # fmt: skip
    for name, config in configs.items():
        folder = GOLDEN / "saved" / name
        shutil.rmtree(folder, ignore_errors=True)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size="20KB")
        ids = checkpoints.random_ids({"vocab_size": tiny["vocab_size"]}, 40)
        np.savez_compressed(folder / "logits.npz", ids=np.array(ids, np.int32), logits=logits_of(load(folder), ids))


def record_default_model() -> None:
    from tokenizers import Tokenizer

    from tfm.engine.default_model import SMOLLM2_135M, ensure_default_model, fetch_gguf

    tokenizer = Tokenizer.from_file(str(ensure_default_model() / "tokenizer.json"))
    with tempfile.TemporaryDirectory() as temporary:
        gguf = fetch_gguf(SMOLLM2_135M, Path(temporary))
        model = load(gguf.parent, gguf_file=gguf.name)
        digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    record = {
        "gguf_sha256": digest,
        "recorded_with": {"torch": torch.__version__, "transformers": transformers.__version__},
        "greedy": [greedy(model, text, tokenizer.encode(text).ids) for text in PROMPTS],
        "perplexity": perplexity(model, tokenizer.encode((GOLDEN / "text.txt").read_text()).ids),
    }
    (GOLDEN / "default_model.json").write_text(compact(record) + "\n")


def greedy(model: Any, text: str, prompt: list[int]) -> dict[str, Any]:
    """NEW_TOKENS tokens, each the likeliest, past any end; and by how much each led the next in logits."""
    continuation: list[int] = []
    gaps: list[float] = []
    new, past = prompt, None
    while len(continuation) < NEW_TOKENS:
        with torch.no_grad():
            out = model(torch.tensor([new]), past_key_values=past, use_cache=True)
        best = out.logits[0, -1].topk(2)
        gaps.append(round(float(best.values[0] - best.values[1]), 4))
        continuation.append(int(best.indices[0]))
        new, past = continuation[-1:], out.past_key_values
    print(f"{text!r}: least gap {min(gaps)}")
    return {"text": text, "prompt": prompt, "continuation": continuation, "gaps": gaps}


def perplexity(model: Any, ids: list[int]) -> dict[str, Any]:
    """exp of the mean of -log p of every token but the first, all in one context."""
    logits = torch.from_numpy(logits_of(model, ids)[:-1]).double()
    losses = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
    return {"text": "text.txt", "tokens": len(ids), "perplexity": math.exp(losses.mean())}


def compact(record: dict[str, Any]) -> str:
    """JSON with a list of numbers on one line."""
    lists: list[str] = []

    def hold(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: hold(item) for key, item in value.items()}
        if isinstance(value, list) and value and not isinstance(value[0], dict):
            lists.append(json.dumps(value))
            return f"@{len(lists) - 1}@"
        return [hold(item) for item in value] if isinstance(value, list) else value

    text = json.dumps(hold(record), indent=1)
    for i, line in enumerate(lists):
        text = text.replace(f'"@{i}@"', line)
    return text


RECORDS = {"tiny": record_tiny, "saved": record_saved, "default-model": record_default_model}

if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:] or RECORDS:
        RECORDS[name]()
